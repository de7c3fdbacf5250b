"""Time of Python for a batch, when the GPU has finished all batches made ahead."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader
from torch_geometric.sampler import BaseSampler, NodeSamplerInput, SamplerOutput

from pyg_direct.bench.limits import wait_for_gpu
from pyg_direct.bench.loader import without_end
from pyg_direct.bench.result_row import Row
from pyg_direct.loader.neighbor_loader import NeighborLoader

_FANOUTS = [15, 10, 5]


def measure_python_time(data: Data, train_idx: Tensor, name: str, batch_sizes: tuple[int, ...] = (1024, 8192),
                        placement: str = "auto") -> Iterator[Row]:  # fmt: skip
    """Time that `next()` takes of the host when the GPU has finished all batches made ahead."""
    for batch_size in sorted({min(size, len(train_idx)) for size in batch_sizes}):
        options: dict[str, Any] = {"batch_size": batch_size, "shuffle": True, "drop_last": True}
        loader = NeighborLoader(data, _FANOUTS, train_idx, seed=0, placement=placement, **options)
        bare = NodeLoader(Data(edge_index=torch.empty(2, 0, dtype=torch.int64), num_nodes=data.num_nodes), _NoSampler(),
                          input_nodes=train_idx, **options)  # fmt: skip
        case = f"loader/{name}/{placement}/{batch_size}"
        yield Row.of(case, "Python time per batch", "us", _time_next(loader), median(_time_next(bare)),
                     "PyG's NodeLoader, no sampling")  # fmt: skip


class _NoSampler(BaseSampler):  # type: ignore[misc]
    """Sampler that returns the seeds, so that only the cost of the loader itself is left."""

    edge_permutation = None

    def sample_from_nodes(self, index: NodeSamplerInput) -> SamplerOutput:
        """Return the seeds without edges."""
        none = torch.empty(0, dtype=torch.int64)
        return SamplerOutput(index.node, none, none, none, metadata=(index.input_id, index.time))

    def sample_from_edges(self, index: Any) -> Any:
        """Not asked for."""
        raise NotImplementedError


def _time_next(batches: Iterable[Any], count: int = 60, warm_up: int = 10) -> list[float]:
    """Microseconds of each `next()`."""
    source, times = without_end(batches), []
    for _ in range(warm_up + count):
        wait_for_gpu()
        begin = time.perf_counter()
        next(source)
        times.append(1e6 * (time.perf_counter() - begin))
    return times[warm_up:]
