"""Hot rows shared out over the GPUs of a clique: which GPU holds which part of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pyg_direct.runtime.spread import GRANULE

# Parts on each GPU: enough to even out how hot they are, few enough to open in no time.
PARTS = 16


def fit_rows(num_rows: int, row_bytes: int, budget: int, num_gpus: int) -> tuple[int, int]:
    """(rows that a clique caches, bytes of a chunk), so that no GPU holds more than `budget` bytes.

    Args:
        num_rows: Rows of the table.
        row_bytes: Bytes of a row as it is stored.
        budget: GPU memory in bytes for each GPU.
        num_gpus: GPUs of the clique.
    """
    count = min(num_rows, budget * num_gpus // max(1, row_bytes))
    chunk_bytes = max(1, math.ceil(count * row_bytes / (PARTS * num_gpus * GRANULE))) * GRANULE
    return min(count, num_gpus * (budget // chunk_bytes) * chunk_bytes // max(1, row_bytes)), chunk_bytes


def weigh_chunks(heat: Tensor | None, num_rows: int, row_bytes: int, chunk_bytes: int) -> Tensor:
    """How often each chunk is read, float64 `[C]`; by its rows where nothing is known.

    Args:
        heat: How often each row is read, `[num_rows]`, in the order of the rows; None if not known.
        num_rows, row_bytes: Of the rows that lie in the chunks, one behind the other.
        chunk_bytes: Of a chunk.
    """
    num_chunks = math.ceil(num_rows * row_bytes / chunk_bytes)
    # A row belongs to the chunk that it begins in.
    chunk_of_row = torch.arange(num_rows, device="cpu") * row_bytes // chunk_bytes
    weights = torch.ones(num_rows, dtype=torch.float64, device="cpu") if heat is None else heat.cpu().double()
    return torch.zeros(num_chunks, dtype=torch.float64, device="cpu").index_add_(0, chunk_of_row, weights)


def deal_chunks(weights: Tensor, devices: Sequence[int]) -> list[int]:
    """The GPU of each chunk: numbers of chunks differ by one at most, and GPUs are read from about equally often.

    The heaviest chunk goes first, each to the GPU that has least so far.
    """
    most = math.ceil(len(weights) / len(devices))
    full = len(weights) - (most - 1) * len(devices)
    load, count, owner = dict.fromkeys(devices, 0.0), dict.fromkeys(devices, 0), [0] * len(weights)
    for chunk in weights.argsort(descending=True, stable=True).tolist():
        # Only so many GPUs may have one chunk more than the others.
        num_full = sum(n == most for n in count.values())
        open_to = [d for d in devices if count[d] < most - 1 or (count[d] < most and num_full < full)]
        target = min(open_to, key=lambda d: (load[d], devices.index(d)))
        owner[chunk] = target
        load[target] += float(weights[chunk])
        count[target] += 1
    return owner
