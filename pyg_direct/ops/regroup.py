"""Arrays by hop, put together by type: segments go to places of their own (`kernels/segment.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_direct.kernels import segment
from pyg_direct.ops.launch import grid_for, run_cpu, run_gpu, runs_on_gpu
from pyg_direct.ops.upload import upload

_NONE = np.zeros(0, np.int64)
# On a CPU, items that are put in one list sooner than the loop is called for each piece.
_FEW_ITEMS = 1 << 16


class Piece(NamedTuple):
    """An array whose segments, one after the other, go to places of their own.

    Attributes:
        items: int64 `[n]`.
        counts: Items of each segment, int64 `[S]`.
        places: Where each goes in the output, int64 `[S]`.
        output: Number of the output.
    """

    items: Tensor
    counts: np.ndarray
    places: np.ndarray
    output: int


def regroup(pieces: Sequence[Piece], outputs: Sequence[Tensor]) -> None:
    """Copy the segments of all pieces into the outputs, int64; the tables of a GPU's kernels travel together."""
    pieces = [piece for piece in pieces if piece.items.numel() > 0]
    if not pieces:
        return
    none = outputs[0][:0]
    on_gpu = runs_on_gpu(none)
    if not on_gpu and sum(piece.items.numel() for piece in pieces) > _FEW_ITEMS:
        for items, counts, places, output in pieces:
            begins = _begin(counts)
            run_cpu(segment.move_segments_cpu, begins, places - begins[:-1], items, none, none, outputs[output], none,
                    none)  # fmt: skip
        return
    # Once for each output.
    groups = [[piece for piece in pieces if piece.output == number] for number in range(len(outputs))]
    tables = []
    for group in groups:
        begins = _begin(np.concatenate([_NONE, *(piece.counts for piece in group)]))
        places = np.concatenate([_NONE, *(piece.places for piece in group)])
        tables += [begins, places - begins[:-1]]
    words = upload(np.concatenate(tables), none.device).split([len(table) for table in tables])
    for number, group in enumerate(groups):
        if not group:
            continue
        items = torch.cat([piece.items for piece in group])
        arguments = (*words[2 * number : 2 * number + 2], items, none, none, outputs[number], none, none)
        if on_gpu:
            run_gpu(segment.move_segments_gpu, grid_for(items.numel(), items), *arguments)
        else:
            run_cpu(segment.move_segments_cpu, *arguments)


def _begin(counts: np.ndarray) -> np.ndarray:
    """Where segments of so many items begin, and the end of the last, int64 `[S + 1]`."""
    begins = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=begins[1:])
    return begins
