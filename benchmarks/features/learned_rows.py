"""Steps of learned rows: `NodeEmbedding` with `SparseAdam` in every memory, beside torch's classes in GPU memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pyg_direct.bench.limits import device_copy_rate, pinned_copy_rate, time_on_clock
from pyg_direct.bench.result_row import Row
from pyg_direct.nn.node_embedding import NodeEmbedding
from pyg_direct.nn.sparse_optimizers import SparseAdam
from pyg_direct.runtime.cuda.device import resolve_device

_PLACES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("GPU memory", {"placement": "cuda"}), ("unified", {"placement": "unified"}),
    ("unified, 20 % hot", {"placement": "unified", "device_cache_size": "20%"}),
)  # fmt: skip
# Rows that a step must move: a batch is read and written, its gradient read; then Adam reads and writes a row and its
# two numbers. Over the link the row is read twice, its numbers once.
_MOVED, _OVER_LINK = 9, 4


def measure_learned_rows(num_rows: int = 4_000_000, width: int = 128, batch_size: int = 200_000) -> Iterator[Row]:
    """Time to read, differentiate and update the rows of a batch, of which 58 % lie in the first fifth."""
    device = resolve_device(None)
    batches = [_draw_ids(num_rows, batch_size, device) for _ in range(4)]
    moved = sum(map(len, batches)) / len(batches) * width * 4
    case = f"learned rows/{num_rows:,} x {width}"
    limit: tuple[float, str] | tuple[()] = ()
    if device.type == "cuda":
        limit = 1e3 * _MOVED * moved / device_copy_rate(), "a device copy of these bytes"
    table: torch.nn.Embedding = torch.nn.Embedding(num_rows, width, sparse=True, device=device)
    seconds = _time_steps(table, torch.optim.SparseAdam(list(table.parameters())), batches)
    theirs = Row.of(case, "torch", "ms", [1e3 * s for s in seconds], *limit)
    yield theirs
    for name, options in _PLACES if device.type == "cuda" else (("CPU", {}),):
        # Two tables and their numbers may not fit.
        del table
        gc.collect()
        table = NodeEmbedding(num_rows, width, device=device, **options)
        seconds = _time_steps(table, SparseAdam(table.parameters()), batches)
        if name == "unified":
            limit = 1e3 * _OVER_LINK * moved / pinned_copy_rate(), "a page-locked copy of the bytes read"
        yield Row.of(case, f"pyg_direct, {name}", "ms", [1e3 * s for s in seconds], *limit)
        yield Row.of(case, f"torch over pyg_direct, {name}", "x", [theirs.p50 / (1e3 * s) for s in seconds])


def _draw_ids(num_rows: int, count: int, device: torch.device) -> Tensor:
    """Draw different ids of a batch, the low ones most often, int64 `[n]`."""
    return (torch.rand(count, device=device) ** 3 * num_rows).long().unique()


def _time_steps(table: torch.nn.Embedding, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> list[float]:
    turns = [0]

    def step() -> None:
        ids = batches[turns[0] % len(batches)]
        turns[0] += 1
        optimizer.zero_grad()
        rows = table(ids)
        rows.backward(rows.detach())
        optimizer.step()

    return time_on_clock(step)
