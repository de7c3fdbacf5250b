"""Rows of masks that come back, as `out[data.train_mask]` in each epoch, read on a GPU without a wait.

For `rows[mask]` torch counts the mask on the GPU, and the host waits for the count, in backward too. The positions of a
mask that was read often are therefore kept as long as the mask, and rows are read by them (`read_rows`). Values and
gradients are equal bit for bit.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from pyg_direct.nn.replay.model_replay import ordinary_passes
from pyg_direct.noedit.program_record import note_made
from pyg_direct.ops.run_kernel import is_ordinary
from pyg_direct.runtime.host.tensor_views import ordinary_tensors

# Reads of a mask before its positions are kept, and the longest mask: longer ones take the GPU longer than the host.
_OFTEN, _LONGEST = 4, 1 << 20
_ROWS = (Tensor, torch.nn.Parameter)
_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int16,
                     torch.int32, torch.int64, torch.bool))  # fmt: skip


class _Met:
    """A mask that was read, with the count of its reads; does not keep it alive.

    Attributes:
        form: Memory of the mask, its count of writes, and the stream.
        positions: Positions of its true elements, int64, ascending; None before they are kept.
    """

    __slots__ = ("form", "mask", "positions", "times")

    def __init__(self, mask: Tensor) -> None:
        place = id(mask)
        self.mask = weakref.ref(mask, lambda _: _MET.pop(place, None))
        self.form: tuple[Any, ...] = ()
        self.times = 0
        self.positions: Tensor | None = None


# By the id of the mask.
_MET: dict[int, _Met] = {}
_read_plainly = torch._C.TensorBase.__getitem__


def read_rows(self: Tensor, index: Any) -> Any:
    """Override `Tensor.__getitem__`, as `rows[mask]`."""
    if type(index) is Tensor and index.dtype is torch.bool and type(self) in _ROWS:
        met = _MET.get(id(index))
        if met is None or met.mask() is not index:
            _note(index)
        elif _may_read(self, index):
            positions = _find_positions(met, index)
            if positions is not None:
                # Its backward adds rows to zeros in one launch, and sorts no positions.
                return self.index_select(0, positions)
    return _read_plainly(self, index)


def _note(mask: Tensor) -> None:
    """Note a mask that was not read before."""
    if (_is_on_gpu(mask) and is_ordinary() and mask.layout is torch.strided and not mask.is_nested and mask.dim() == 1
            and mask.numel() <= _LONGEST and not mask.is_inference()):  # fmt: skip
        _MET[id(mask)] = _Met(mask)


def _may_read(rows: Tensor, mask: Tensor) -> bool:
    """Report whether rows may be read by positions of a mask."""
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and is_ordinary()
        # A recording would keep the present positions.
        and ordinary_passes.depth == 0
        and rows.dtype in _DTYPES
        and rows.device == mask.device
        and rows.layout is torch.strided
        and not rows.is_nested
        and rows.shape[:1] == mask.shape
        # Otherwise the memory of the result has another order.
        and rows.is_contiguous()
    )


def _find_positions(met: _Met, mask: Tensor) -> Tensor | None:
    """Return the positions of a mask that came back; None for a mask that is new or was written."""
    stream = torch._C._cuda_getCurrentRawStream(mask.get_device()) if mask.is_cuda else 0
    form = mask.data_ptr(), mask._version, mask.shape, mask.stride(), stream
    if met.form != form:
        met.form, met.times, met.positions = form, 0, None
    met.times += 1
    # Torch's default stream is never captured.
    if met.times <= _OFTEN or (stream and torch.cuda.is_current_stream_capturing()):
        return None
    if met.positions is None:
        with ordinary_tensors(), torch.no_grad():
            met.positions = torch.nonzero(mask).view(-1)
        note_made("rows of a mask")
    return met.positions


def _is_on_gpu(mask: Tensor) -> bool:
    return mask.is_cuda
