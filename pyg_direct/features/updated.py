"""The part of `Feature` that changes rows where they lie: node embeddings that are trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.features.store import narrow_rows
from pyg_direct.ops.check import as_ids, check_ids
from pyg_direct.ops.gather import Directory, gather_rows, unread_errors
from pyg_direct.ops.locate import locate_ids
from pyg_direct.ops.scatter import keep_last, scatter_rows


class UpdatedRows:
    """What a `Feature` does to write rows; its constructor sets the attributes."""

    device: torch.device
    store_dtype: torch.dtype | None
    _dtype: torch.dtype
    _hot: Tensor | None
    _cold: Tensor | None
    _directory: Directory | None
    _exponents: Tensor | None
    _errors: Tensor | None
    _order: Tensor | None
    _handle: Any
    _spilled: Any
    _block: Any
    # Calls that have changed rows.
    _num_updates = 0

    @property
    def num_writes(self) -> int:
        """Number of writes to the rows: calls of `update_`, and on a CPU writes to the tensor that they are of."""
        hot = self._hot
        return self._num_updates + (0 if hot is None or hot.is_cuda or hot.is_inference() else hot._version)

    def update_(self, ids: Tensor | Sequence[int], rows: Tensor) -> Any:
        """Replace the rows of ids by `rows`, wherever they lie; returns self.

        The hot copy in GPU memory and the row on the host are both written, so that a tensor that the feature was made
        of shows the new rows too (on a GPU, once it has run: see `synchronize`). For node embeddings: read the rows of
        a batch, compute the new ones from the gradient with any optimizer of sparse rows, and write them back.

        Args:
            ids: int32 or int64 `[n]` on any device, or a list; of one that comes several times, the last row counts.
            rows: `[n, ...]` of the feature's dtype, on any device; rows that are stored in fewer bits are rounded.

        Raises:
            ArgumentError: rows of another shape or dtype, rows in a file, or rows that processes share.
            ArgumentTypeError: `rows` are no tensor, or `ids` no ids.
            IdError: as in `feature[ids]`; nothing is written for ids that are out of range.
        """
        shape = self._filled()
        if self._spilled is not None:
            raise ArgumentError(f"rows of {self._spilled.placement!r} cannot be updated: {self._spilled.refusal}")
        if self._handle is not None:
            raise ArgumentError("rows that several processes share cannot be updated: they are read-only")
        if not isinstance(rows, Tensor):
            raise ArgumentTypeError(f"rows must be a tensor, got {type(rows).__name__}")
        ids = check_ids("ids", as_ids("ids", ids), shape[0])
        if rows.shape != (ids.numel(), *shape[1:]) or rows.dtype != self._dtype:
            raise ArgumentError(f"rows must be {(ids.numel(), *shape[1:])} of {self._dtype}, got {tuple(rows.shape)} "
                                f"of {rows.dtype}")  # fmt: skip
        self._raise_earlier_error()
        hot = self._hot
        assert hot is not None
        target = self.device if hot.is_cuda else torch.device("cpu")
        if self._block is not None:
            self._block.check_process()
        ids, rows = ids.to(target), rows.detach().to(target)
        if self._order is not None:
            ids = gather_rows(self._order.to(target), ids, errors=self._errors) - 1
        if ids.numel() == 0:
            return self
        self._num_updates += 1
        ids, rows = keep_last(ids.contiguous(), rows.contiguous())
        if hot.dtype != self._dtype:
            rows, exponents = narrow_rows(rows, hot.dtype)
            if exponents is not None:
                assert self._exponents is not None
                scatter_rows(self._exponents, ids, exponents, errors=self._errors, is_unique=True)
        if self._cold is None:
            scatter_rows(hot, ids, rows, errors=self._errors, is_unique=True)
            return self
        scatter_rows(self._cold, ids, rows, errors=self._errors, is_unique=True)
        if self._directory is not None:
            places = locate_ids(ids, self._directory, shape[0])
            # Rows that are not hot have no place, which is no error.
            scatter_rows(hot, places, rows, errors=unread_errors(target), is_unique=True)
        return self

    # What the rest of a `Feature` does.

    def _filled(self) -> torch.Size:
        raise NotImplementedError

    def _raise_earlier_error(self) -> None:
        raise NotImplementedError
