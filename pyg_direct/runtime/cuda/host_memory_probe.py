"""Choice of the host memory that a GPU reads faster at random positions, measured once on each machine.

Unified memory wins a tie. If the driver maps it in 2 MB pages it keeps its rate as a table grows. Page-locked memory in
4 KB pages falls to a third (an H200 beside an x86 host, at 32 GB; up to 256 MB both are alike). The measurement finds
machines that serve unified memory badly: by faults, by migration or not at all. A large table is read once more when it
is filled, because a small one may be served better.
"""

from __future__ import annotations

import functools
import platform
from functools import partial
from typing import Any

import torch

from pyg_direct.cache_folder import recall
from pyg_direct.errors import PlacementWarning, PygDirectError, warn
from pyg_direct.profiling import time_on_stream
from pyg_direct.runtime.cuda.device import abilities
from pyg_direct.runtime.cuda.memory import Block, allocate

CANDIDATES = ("unified", "pinned")
# Filled within a few milliseconds, and larger than the caches of a GPU.
_TABLE_BYTES = 64 << 20
_ROW_BYTES = 512
_NUM_READS = 1 << 15
# Tables from this size on are read when they are filled; slow is less than this share of a small table's rate.
_LARGE = 1 << 30
_SLOW = 0.25
# Page-locked memory must be this much faster to be chosen.
_MARGIN = 1.1


@functools.cache
def choose_host_memory(index: int) -> str:
    """Return `unified` or `pinned`, whichever GPU `index` reads rows of faster at random; see `host_memory_rates`."""
    return decide(host_memory_rates(index)) if abilities(index).managed_without_migration else "pinned"


def host_memory_rates(index: int) -> dict[str, float]:
    """Return the bytes a second that GPU `index` reads at random, by kind of host memory; 0 for a kind that cannot be
    allocated.

    Takes at most 0.2 s on a machine that is not known yet; the rates are kept in `host_memory.json` in the package's
    cache folder, by GPU model, driver and host.
    """
    model, driver = torch.cuda.get_device_name(index), abilities(index).driver_version
    key = f"{model} | driver {driver} | {platform.node()}"
    rates: dict[str, float] = recall("host_memory", key, lambda: {name: _measure(name, index) for name in CANDIDATES},
                                     _are_rates)  # fmt: skip
    return rates


def _are_rates(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), (int, float)) for name in CANDIDATES)


def decide(rates: dict[str, float]) -> str:
    """Choose the placement for row rates in bytes a second; 0 stands for a placement that cannot be allocated."""
    return "pinned" if rates["pinned"] > _MARGIN * rates["unified"] else "unified"


def _measure(placement: str, index: int) -> float:
    """Measure bytes a second of random rows from a small table; 0 if it cannot be allocated."""
    device = torch.device("cuda", index)
    try:
        block = allocate(_TABLE_BYTES, placement, device)
    except PygDirectError:
        return 0.0
    block.view_on_cpu(torch.int64, _shape_of(block)).fill_(1)
    return _read_at_random(block)


def _shape_of(block: Block) -> tuple[int, int]:
    return block.num_bytes // _ROW_BYTES, _ROW_BYTES // 8


def _read_at_random(block: Block) -> float:
    """Measure bytes a second of random rows that the GPU of a block reads from it."""
    assert block.device is not None
    device, shape = block.device, _shape_of(block)
    table = block.view_on_gpu(torch.int64, shape, device)
    # A separate generator: a probe must not change the draws of a user's program.
    draws = torch.Generator(device).manual_seed(0)
    seconds = []
    with torch.cuda.device(device):
        out = torch.empty(_NUM_READS, shape[1], dtype=torch.int64, device=device)
        for _ in range(3):
            ids = torch.randint(shape[0], (_NUM_READS,), device=device, generator=draws)
            seconds.append(time_on_stream(partial(torch.index_select, table, 0, ids, out=out)))
    return _NUM_READS * _ROW_BYTES / min(seconds[1:])


def check_filled(block: Block, what: str) -> None:
    """Read 50 MB of a large table in host memory at random, once it is filled.

    Warns if it is read at less than a quarter of the rate of a small table. This happens if the driver moves or maps
    memory page by page. Other work on the link at the same time slows reads less.

    Args:
        block: Any block; only large blocks in host memory that a GPU reads are read.
        what: Noun for its contents.
    """
    if block.placement not in CANDIDATES or block.num_bytes < _LARGE or block.device is None:
        return
    expected, rate = host_memory_rates(block.device.index)[block.placement], _read_at_random(block)
    if rate < _SLOW * expected:
        other = CANDIDATES[1 - CANDIDATES.index(block.placement)]
        warn(f"the GPU reads {what} at {rate / 1e9:.2g} GB/s at random from {block.num_bytes / 1e9:.3g} GB of "
             f"{block.placement} memory, a small table at {expected / 1e9:.2g}: placement={other!r} may be faster",
             PlacementWarning)  # fmt: skip
