"""Rows by a mask or by ids that come back, in programs that are not edited: read without a wait for the GPU.

A loop over a whole graph reads rows by the same masks in each epoch, as in `out[data.train_mask]`. Torch counts the
nodes of a mask each time, forward and backward, and waits for that count. In backward it also sorts their ids. Here the
ids are remembered, and `index_select` reads the rows. Results and gradients are equal bit for bit, because no row is
read twice.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_direct.noedit.program_record import note_made
from pyg_direct.ops.run_kernel import is_heard, is_ordinary
from pyg_direct.runtime.host.tensor_views import ordinary_tensors

# Reads by the same index before it is remembered. To check that ids differ takes a wait, which a mask costs anyway.
_OFTEN = {torch.bool: 1, torch.int64: 8}
_DTYPES = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool))
_PLAIN = frozenset((Tensor, torch.nn.Parameter))


class _Met(NamedTuple):
    """An index that was met.

    Attributes:
        tensor: The index; its death removes this.
        version: Count of its writes.
        stream: Stream on which it was read.
        times: Reads so far, while it is not known whether its rows differ.
        rows: Ids of the rows of a mask; True if the index holds ids that differ, False if it does not.
    """

    tensor: weakref.ref[Tensor]
    version: int
    stream: int
    times: int
    rows: Tensor | bool | None = None


# By the id of the tensor.
_MET: dict[int, _Met] = {}


def make_getitem(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Make a replacement of `Tensor.__getitem__`; all but plain rows of a GPU by known ids go to `original`."""

    @wraps(original)
    def __getitem__(self: Any, index: Any) -> Any:  # noqa: N807
        if torch.compiler.is_compiling():
            # Torch's compiler would warn that it cannot trace `original`.
            return super(Tensor, self).__getitem__(index)
        # Most indices are numbers and slices.
        if type(index) is not Tensor or index.dtype not in _OFTEN or not _may_select(self, index):
            return original(self, index)
        rows = _find_rows(index)
        return original(self, index) if rows is None else self.index_select(0, rows)

    return __getitem__


def _may_select(table: Tensor, index: Tensor) -> bool:
    """Report whether `index_select` reads the rows as torch does by an index, and nothing watches the call."""
    return (
        # First: a traced comparison of shapes is no number.
        is_ordinary()
        and _is_near(index)
        and type(table) in _PLAIN
        and index.dim() == 1
        and table.dim() > 0
        and table.device == index.device
        and table.dtype in _DTYPES
        and table.layout is torch.strided
        and table.is_contiguous()
        and (index.dtype is not torch.bool or table.shape[0] == index.shape[0])
        and not index.is_inference()
        and not is_heard(table)
        and torch._C._len_torch_function_stack() == 0
        and not _is_watched()
    )


def _is_near(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _is_watched() -> bool:
    """Report whether waits for the GPU are looked for, as before a recording, or a recording is in progress.

    A graph would go on reading the ids of now.
    """
    return torch.cuda.is_initialized() and (
        torch._C._cuda_get_sync_debug_mode() != 0 or torch.cuda.is_current_stream_capturing()
    )


def _find_rows(index: Tensor) -> Tensor | None:
    """Return the ids of the rows of an index that comes back; None if they are not known, or a row is read twice."""
    place, version = id(index), index._version
    stream = torch._C._cuda_getCurrentRawStream(index.device.index) if index.is_cuda else 0
    met = _MET.get(place)
    if met is None or met.tensor() is not index or met.version != version or met.stream != stream:
        _MET[place] = _Met(weakref.ref(index, lambda dead: _forget(place, dead)), version, stream, 1)
        return None
    rows = met.rows
    if rows is None:
        if met.times < _OFTEN[index.dtype]:
            _MET[place] = met._replace(times=met.times + 1)
            return None
        rows = _read_rows(index)
        _MET[place] = met._replace(rows=rows)
        if rows is not False:
            note_made("rows by a mask or ids")
    if isinstance(rows, bool):
        return index if rows else None
    return rows


def _forget(place: int, dead: weakref.ref[Tensor]) -> None:
    """Remove an index that is gone, unless another tensor has its place."""
    met = _MET.get(place)
    if met is not None and met.tensor is dead:
        del _MET[place]


@ordinary_tensors()
def _read_rows(index: Tensor) -> Tensor | bool:
    """Return the ids of a mask; of ids, report whether they differ and count from the first row."""
    if index.dtype is torch.bool:
        return index.nonzero().view(-1)
    return index.numel() > 0 and int(index.min()) >= 0 and index.unique().numel() == index.numel()
