"""What a feature is made of when several processes of a host read it: sent to each, opened by each for its device.

Rows on the host are there once, in shared memory. Hot rows are copied by every GPU (`device_replicate`), or lie once in
the memories of a clique, for each of its GPUs to read (`p2p_clique_replicate`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, CudaError, PlacementWarning, warn
from pyg_direct.features.clique import deal_chunks, fit_rows, weigh_chunks
from pyg_direct.features.cold import choose_cold
from pyg_direct.features.hotness import choose_hottest
from pyg_direct.ops.gather import Directory
from pyg_direct.runtime.device import free_bytes
from pyg_direct.runtime.memory import Block, allocate, fill
from pyg_direct.runtime.shared import SharedMemory, pin, share
from pyg_direct.runtime.spread import GRANULE, Spread

_LOGGER = logging.getLogger(__name__)
_FREE_SHARE = 0.9
# Rows that are copied to GPU memory at once.
_PIECE = 1 << 18


@dataclass
class HotRows:
    """The hot rows of a group of GPUs.

    Attributes:
        devices: The GPUs that read them.
        count: How many they are.
        directory: Bits and ranks of their ranked bitmap; None where they are none or all.
        spread: Where they lie, shared out over the GPUs; None where every GPU makes its own copy.
    """

    devices: list[int]
    count: int
    directory: tuple[SharedMemory, SharedMemory] | None = None
    spread: Spread | None = None

    def open_directory(self) -> Directory | None:
        """The directory, on the CPU."""
        if self.directory is None:
            return None
        bits, ranks = self.directory
        return Directory(bits.bytes.view(torch.uint32), ranks.bytes.view(torch.int32))


@dataclass
class Handle:
    """A feature as it is sent.

    Attributes:
        shape: Of the table, `[N, ...]`.
        stored: Dtype of the rows where they lie.
        dtype: Dtype of the rows as they are read.
        host: All rows.
        cold: Where GPUs read the others than the hot ones: `unified` or `pinned`.
        exponents: Of float8 rows, uint8 `[N]`.
        misses: Share of all reads that miss the hot rows, by listings, for each entry of `hot`.
        hot: Of each clique.
        options: Arguments of the `Feature`.
        order: Row of each id, counted from 1, where ids are not rows.
    """

    shape: torch.Size
    stored: torch.dtype
    dtype: torch.dtype
    host: SharedMemory
    cold: str
    exponents: Tensor | None = None
    misses: list[float] = field(default_factory=list)
    hot: list[HotRows] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    order: Tensor | None = None

    @property
    def rows(self) -> Tensor:
        """All rows, on the CPU."""
        return self.host.view(self.stored, self.shape)

    def find_hot(self, device: torch.device) -> int | None:
        """Which hot rows a device reads."""
        return next((i for i, hot in enumerate(self.hot) if device.index in hot.devices), None)


@dataclass
class Opened:
    """The tables of one process; see `Feature`."""

    hot: Tensor
    cold: Tensor | None = None
    directory: Directory | None = None
    block: Block | None = None
    misses: float = 1.0
    exponents: Tensor | None = None


def make_handle(rows: Tensor, dtype: torch.dtype, exponents: Tensor | None, heat: Tensor | None, budget: int,
               cliques: Sequence[Sequence[int]], *, policy: str, cold_policy: str) -> Handle:  # fmt: skip
    """Share the rows, choose the hot ones and put them where GPUs read them.

    Args:
        rows: `[N, ...]` on the CPU, contiguous; becomes a view of shared memory.
        dtype: Dtype they are read as.
        exponents: Of float8 rows.
        heat: How often each row is read, `[N]`; None takes the first rows for hot.
        budget: GPU memory in bytes for the hot rows of each GPU.
        cliques: GPUs of this host that read each other's memory; none on a CPU.
        policy: `device_replicate` or `p2p_clique_replicate`.
        cold_policy: See `Feature`; the rows of one process, or of one host, are not shared out.
    """
    host = share(rows, what="features")
    devices = [index for clique in cliques for index in clique]
    num_bytes = rows.numel() * rows.element_size()
    handle = Handle(rows.shape, rows.dtype, dtype, host, choose_cold(cold_policy, num_bytes, devices), exponents)
    if not devices:
        return handle
    # Of one GPU: to ask the others would take some of their memory for this process.
    most = int(_FREE_SHARE * free_bytes(devices[0]))
    if budget > most:
        warn(
            f"device_cache_size={budget} is more than the free memory of GPU {devices[0]}; {most} bytes are "
            "used instead",
            PlacementWarning,
        )
        budget = most
    row_bytes = num_bytes // max(1, len(rows))
    is_spread = policy == "p2p_clique_replicate" and budget >= GRANULE
    for clique in cliques if is_spread else [devices]:
        count, chunk_bytes = fit_rows(len(rows), row_bytes, budget, len(clique) if is_spread else 1)
        if not is_spread:
            count = min(len(rows), budget // max(1, row_bytes))
        ids, misses = choose_hottest(heat, len(rows), count)
        hot = HotRows(list(clique), count)
        if 0 < count < len(rows):
            directory = Directory.of(ids, len(rows))
            hot.directory = share(directory.bits), share(directory.ranks)
        if is_spread and len(clique) > 1 and count > 0:
            hot.spread = _spread_rows(rows, ids, None if heat is None else heat.cpu()[ids], clique, chunk_bytes)
        handle.hot.append(hot)
        handle.misses.append(misses)
    _say(handle, row_bytes)
    return handle


def _spread_rows(rows: Tensor, ids: Tensor, heat: Tensor | None, clique: Sequence[int], chunk_bytes: int) -> Spread:
    row_bytes = rows[0].numel() * rows.element_size()
    owners = deal_chunks(weigh_chunks(heat, len(ids), row_bytes, chunk_bytes), clique)
    spread = Spread.allocate(len(ids) * row_bytes, chunk_bytes, owners)
    _copy_rows(rows, ids, _as_rows(spread.view(clique[0]), rows))
    torch.cuda.synchronize(clique[0])
    return spread


def _as_rows(flat: Tensor, rows: Tensor) -> Tensor:
    return flat.view(rows.dtype).view(-1, *rows.shape[1:])


def _copy_rows(rows: Tensor, ids: Tensor, target: Tensor) -> None:
    if len(ids) == len(rows):
        target.copy_(rows)
        return
    # In pieces, so that the host holds no second copy of the hot rows.
    for part, ids_of_part in zip(target.split(_PIECE), ids.split(_PIECE), strict=True):
        part.copy_(rows[ids_of_part])


def list_hot_ids(directory: Directory) -> Tensor:
    """Ids of a directory on the CPU, ascending, int64."""
    words = directory.bits.view(torch.int32)
    pieces = []
    for begin in range(0, len(words), _PIECE):
        bits = (words[begin : begin + _PIECE, None] >> torch.arange(32, dtype=torch.int32, device="cpu")) & 1
        pieces.append(32 * begin + bits.view(-1).nonzero().view(-1))
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64, device="cpu")


def open_handle(handle: Handle, device: torch.device) -> Opened:
    """The tables as a device of this process reads them."""
    rows = handle.rows
    if device.type == "cpu":
        return Opened(rows, exponents=handle.exponents)
    number = handle.find_hot(device)
    hot = HotRows([], 0) if number is None else handle.hot[number]
    exponents = None if handle.exponents is None else handle.exponents.to(device)
    if hot.spread is not None:
        table = _as_rows(hot.spread.view(device.index), rows)
    else:
        table = torch.empty((hot.count, *rows.shape[1:]), dtype=rows.dtype, device=device)
        if hot.count > 0:
            directory = hot.open_directory()
            ids = torch.arange(len(rows), device="cpu") if directory is None else list_hot_ids(directory)
            _copy_rows(rows, ids, table)
    if hot.count == len(rows):
        return Opened(table, exponents=exponents, misses=0.0)
    block = _place_cold(handle, device)
    directory = hot.open_directory()
    directory = None if directory is None else directory.to(device)
    misses = 1.0 if number is None else handle.misses[number]
    return Opened(table, block.view_on_gpu(handle.stored, handle.shape, device), directory, block, misses, exponents)


def _place_cold(handle: Handle, device: torch.device) -> Block:
    num_bytes = handle.host.num_bytes
    if handle.cold == "unified":
        block = allocate(num_bytes, "unified", device)
        fill(block.view_on_cpu(handle.stored, handle.shape), handle.rows, what="features")
        return block
    try:
        return pin(handle.host, device)
    except CudaError as error:
        raise ArgumentError(f"cold_policy='pinned' could not lock {num_bytes} bytes of host memory: {error}") from error


def _say(handle: Handle, row_bytes: int) -> None:
    size = handle.host.num_bytes
    groups = [f"GPUs {','.join(map(str, h.devices))}: {h.count} hot rows "
              f"{'shared out' if h.spread is not None else 'each'}" for h in handle.hot]  # fmt: skip
    copies = sum(len(h.devices) for h in handle.hot) if handle.cold == "unified" else 0
    _LOGGER.info(
        "%d rows of %d bytes: %s; the others %s, %.1f GB of host memory in %d + 1 copies", handle.shape[0], row_bytes,
        "; ".join(groups), handle.cold, (copies + 1) * size / 1e9, copies)  # fmt: skip
