"""Slowdown of a replayed step by simultaneous reads of host memory, by the number of reading blocks.

There are three possible causes: blocks that replace the step's own, common memory bandwidth, and the link, over which a
GPU also fetches its launches. A chain of kernels that compute nothing isolates the last one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from itertools import repeat
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

from benchmarks.nn.aggregation import capture
from benchmarks.nn.models import count_host_bytes
from pyg_direct.bench.limits import pinned_copy_rate, time_on_gpu
from pyg_direct.bench.loader import find_loss, run_steps, without_end
from pyg_direct.bench.result_row import Row
from pyg_direct.features.feature import Feature
from pyg_direct.features.memory_rows import MemoryRows
from pyg_direct.loader.neighbor_loader import NeighborLoader
from pyg_direct.nn.accelerate import accelerate
from pyg_direct.nn.replay.graphed_step import GraphedStep
from pyg_direct.profiling import time_on_stream

_FANOUTS = [15, 10, 5]
_WARM_UP = 8
_CHAIN = 100
# Shares of the blocks that a feature chooses.
SHARES = (1.0, 0.5, 0.25, 0.125)


def measure_link_share(data: Data, train_idx: Tensor, num_classes: int, name: str, cache: str = "20%",
                       batches: int = 48) -> Iterator[Row]:  # fmt: skip
    """Measure replayed epochs of SAGE with a part of the rows on the GPU, and their parts, with fewer and fewer blocks.

    Args:
        data: A graph; its rows are moved to unified memory.
        train_idx: Seeds.
        num_classes: Classes of the model.
        name: Name of the graph.
        cache: GPU memory for hot rows.
        batches: Steps measured.
    """
    loader = NeighborLoader(copy.copy(data), _FANOUTS, train_idx, batch_size=min(1024, len(train_idx)), shuffle=True,
                            drop_last=True, seed=0, placement="unified", topology_placement="cuda",
                            feature_cache=cache)  # fmt: skip
    first = next(iter(loader))
    model = GraphSAGE(first.x.shape[1], 256, len(_FANOUTS), num_classes).to(first.x.device)
    accelerate(model, replay=False)
    optimizer = torch.optim.Adam(model.parameters(), fused=next(model.parameters()).is_cuda)
    step: Callable[[Any], Any] = GraphedStep(model, partial(find_loss, model), optimizer, warm_up=_WARM_UP)
    run_steps(without_end(loader), step, 2 * _WARM_UP, 2)
    compute = median(run_steps(repeat(first), step, batches))
    link = 1e3 * count_host_bytes(loader, first, batches) / pinned_copy_rate()
    chain = _make_chain(first.x.device)
    yield Row.of(f"link_share/{name}", f"{_CHAIN} kernels of a graph, alone", "us",
                 [1e6 * s for s in time_on_gpu(chain)])  # fmt: skip
    feature: Feature = loader._list_places()[1]["x"]
    rows = feature.stored
    assert isinstance(rows, MemoryRows)
    chosen = rows.max_blocks or 1
    for share in SHARES:
        blocks = max(1, round(share * chosen))
        rows.limit_blocks(blocks)
        case = f"link_share/{name}/{blocks} blocks"
        read = partial(feature.read, first.n_id)
        yield Row.of(case, "rows of a batch, alone", "ms", [1e3 * s for s in time_on_gpu(read)], link, "link")
        yield Row.of(case, f"{_CHAIN} kernels of a graph, beside them", "us", _time_beside(chain, read))
        yield Row.of(case, "step with loader, replayed", "ms", run_steps(without_end(loader), step, batches),
                     max(compute, link), "slowest part alone",
                     f"of compute {compute:.2f}, link {link:.2f} ms")  # fmt: skip
    rows.limit_blocks(chosen)


def _make_chain(device: torch.device) -> Callable[[], object]:
    """Make a replay of kernels that each add one to one number."""
    number = torch.zeros(1, device=device)

    def work() -> None:
        for _ in range(_CHAIN):
            number.add_(1)

    replay = capture(work)
    assert replay is not None, "nothing in it waits"
    return replay


def _time_beside(chain: Callable[[], object], read: Callable[[], Any], repeats: int = 10) -> list[float]:
    """Measure microseconds of the chain while rows are read on another stream."""
    side, times = torch.cuda.Stream(priority=-1), []
    for _ in range(repeats):
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            for _ in range(8):
                read()
        times.append(1e6 * time_on_stream(chain, 4))
    torch.cuda.synchronize()
    return times
