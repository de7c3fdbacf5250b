"""Columns of a `TensorFrame` of PyTorch Frame, placed in memory that batches read, as other attributes are.

Columns of one kind are a table: numbers, categories, times, embeddings, and the frame's target. Values of any length,
such as words, are cut out by the frame itself, where the program put them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_direct.features.feature import Feature

# Name of a frame's target among its kinds of columns.
_TARGET = "y"


class Columns(NamedTuple):
    """Key of a placed table of a frame.

    Attributes:
        key: Key of the attribute that is the frame.
        kind: Kind of the columns, or "y".
    """

    key: Any
    kind: Any


def list_tables(frame: Any) -> Iterator[tuple[Any, Tensor]]:
    """List (kind of columns, rows of all of them `[N, ...]`); embeddings are one row after the other."""
    for kind, column in [*frame.feat_dict.items(), (_TARGET, frame.y)]:
        table = column if isinstance(column, Tensor) else _find_embeddings(column)
        if table is not None and table.layout == torch.strided and table.dim() and len(table) == frame.num_rows:
            yield kind, table


def _find_embeddings(column: Any) -> Tensor | None:
    """Return the rows of columns of embeddings; None for values of any length, which `offset` counts for each row."""
    values, offset = getattr(column, "values", None), getattr(column, "offset", None)
    if not (isinstance(values, Tensor) and isinstance(offset, Tensor)) or values.dim() != 2:
        return None
    return values if offset.numel() == column.num_cols + 1 else None


class FrameRows:
    """Slicer of a frame: rows of placed tables, and what the frame cuts out itself.

    Args:
        device: Device of batches.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._features: dict[Any, Feature] = {}
        # Ends of the columns of embeddings, on the device of batches.
        self._offsets: dict[Any, Tensor] = {}

    def put(self, frame: Any, kind: Any, feature: Feature) -> None:
        """Take the place of a table."""
        self._features[kind] = feature
        column = None if kind == _TARGET else frame.feat_dict[kind]
        if column is not None and not isinstance(column, Tensor):
            self._offsets[kind] = column.offset.to(self._device)

    def __call__(self, frame: Any, ids: Tensor) -> Any:
        """Return the frame of some rows, on the device of batches.

        Args:
            ids: int64 `[n]` on the device of batches.
        """
        made = copy.copy(frame)
        columns: dict[Any, Any] = {}
        own: Tensor | None = None
        for kind, column in [*frame.feat_dict.items(), (_TARGET, frame.y)]:
            feature = self._features.get(kind)
            if feature is not None:
                columns[kind] = self._fill(kind, column, feature[ids])
            elif column is not None:
                own = ids.to(frame.device) if own is None else own
                columns[kind] = {name: part[own].to(self._device) for name, part in column.items()} \
                    if isinstance(column, dict) else column[own].to(self._device)  # fmt: skip
        made.y = columns.pop(_TARGET, None)
        made.feat_dict = columns
        if made._num_rows is not None:
            made._num_rows = ids.numel()
        return made

    def _fill(self, kind: Any, column: Any, rows: Tensor) -> Any:
        """Return columns like these of other rows."""
        if isinstance(column, Tensor):
            return rows
        # The constructor would wait for a GPU.
        made = copy.copy(column)
        made.num_rows, made.values, made.offset = len(rows), rows, self._offsets[kind]
        return made
