"""Numbers that a model's forward reads on the host, such as that of `assert (x >= 0).all()`, in recorded passes.

A recording cannot wait for the device. `HostReads` learns the numbers in a trial pass, and answers with them while the
pass is recorded. The recorded pass computes them again, and notes on the device if one differs. A replay waits for that
note, and an ordinary pass takes its place if a number differs.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_READ = _aten._local_scalar_dense.default
_FILL, _FILL_IN_PLACE = _aten.index_put.default, _aten.index_put_.default
# Functions of all rows that more rows can only raise, the last one for a mask, or only lower.
_RISE = frozenset((_aten.any.default, _aten.count_nonzero.default, _aten.sum.default))
_FALL = frozenset((_aten.all.default,))
# Functions of such a number that keep this, or turn it round; comparisons do if the other number is 0.
_KEEP = frozenset((_aten.ne.Scalar, _aten.gt.Scalar))
_INVERT = frozenset((_aten.logical_not.default, _aten.bitwise_not.default, _aten.eq.Scalar))
# Note on the host before a replay has made it.
_UNKNOWN = -1
_OTHER_READS = "forward reads more numbers on the host in one pass than in another"


class OtherAnswersError(Exception):
    """Signal that a replayed pass would have read other numbers than the recorded one."""


class MaskedFills(TorchDispatchMode):
    """Block in which an assignment under a mask, as `x[mask] = value`, does not wait for the count of its rows."""

    def __init__(self) -> None:
        super().__init__()
        # Such assignments so far.
        self.fills = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _FILL or func is _FILL_IN_PLACE:
            filled = _fill(*args, **kwargs)
            if filled is not None:
                self.fills += 1
                return filled if func is _FILL else args[0].copy_(filled)
        return func(*args, **kwargs)


def _fill(rows: Tensor, indices: Any, value: Tensor, accumulate: bool = False) -> Tensor | None:
    """Return rows with one value in the place of those under a mask; None for any other assignment."""
    mask = indices[0]
    if accumulate or len(indices) != 1 or mask is None or mask.dtype != torch.bool:
        return None
    width = rows.dim() - mask.dim()
    # A value for each row under the mask would depend on their number. torch does not wait for a number of the host.
    if value.dim() > width or value.device != rows.device or mask.device != rows.device:
        return None
    return torch.where(mask.view(*mask.shape, *[1] * width), value.to(rows.dtype), rows)


class HostReads(MaskedFills):
    """Numbers that forward passes in this block read on the host: learned in the first pass, and given in the others.

    Args:
        device: Of the passes.
        num_rows: Numbers of rows that hold padding; None if nothing does. Then a number may only tell whether any or
            all of them fulfil a condition, as far as padding cannot change it.

    Attributes:
        is_needed: True if passes run in this block: until it is known that nothing is read or assigned so.
        answers: Numbers in the order in which they are read; None before they are known.
    """

    def __init__(self, device: torch.device, num_rows: Collection[int] | None) -> None:
        super().__init__()
        self._device, self._num_rows = device, num_rows
        self.is_needed = False
        self.answers: list[Any] | None = None
        self._learned: list[Any] = []
        self._place = 0
        # Numbers of the pass, and whether padding can only raise them; otherwise it can only lower them.
        self._rises: dict[int, tuple[Tensor, bool]] = {}
        # On the device 1 if an answer differs, and what the host knows of it, in memory that both see.
        self._differs, self._note = torch.empty(0), torch.empty(0)

    def __enter__(self) -> HostReads:
        self._place, self._rises, self._learned = 0, {}, []
        if self.answers:
            self._differs.zero_()
        super().__enter__()
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        super().__exit__(kind, *error)
        self._rises = {}
        if kind is not None:
            return
        if self.answers is not None:
            if self._place < len(self.answers):
                raise RuntimeError(_OTHER_READS)
            return
        self.answers, self.is_needed = self._learned, bool(self._learned or self.fills)
        if self.answers:
            self._differs = torch.zeros(1, dtype=torch.int32, device=self._device)
            self._note = torch.zeros(1, dtype=torch.int32, pin_memory=self._device.type == "cuda")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _READ and args[0].device == self._device:
            return self._read(args[0])
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self._num_rows is not None and self.answers is None:
            self._follow(func, args, out)
        return out

    def _follow(self, func: Any, args: Any, out: Any) -> None:
        """Note whether padding can only raise a number, or only lower it."""
        is_rise, is_kept = func in _RISE, func in _KEEP
        if is_rise or func in _FALL:
            rows = args[0]
            is_mask = rows.dtype == torch.bool or func is not _aten.sum.default
            if is_mask and rows.dim() > 0 and rows.shape[0] in (self._num_rows or ()):
                # Held, so that its id is given to no other.
                self._rises[id(out)] = out, is_rise
        elif (is_kept or func in _INVERT) and id(args[0]) in self._rises and not any(args[1:]):
            self._rises[id(out)] = out, self._rises[id(args[0])][1] == is_kept

    def _read(self, number: Tensor) -> Any:
        if self.answers is None:
            answer = _read_now(number)
            # If padding can only raise a number that is 0, it is 0 without padding too.
            if self._num_rows is not None and self._rises.get(id(number), (number, bool(answer)))[1] == bool(answer):
                raise RuntimeError("forward reads a number on the host that padding may change")
            self._learned.append(answer)
            return answer
        if self._place == len(self.answers):
            raise RuntimeError(_OTHER_READS)
        answer = self.answers[self._place]
        self._place += 1
        # An answer that is no number stays so.
        self._differs.logical_or_(number == number if answer != answer else number != answer)
        if self._place == len(self.answers):
            # The host knows it while the rest of the pass runs.
            self._note.copy_(self._differs, non_blocking=True)
        return answer

    def expect(self) -> None:
        """Expect the note of a replay that is launched next."""
        self._note[0] = _UNKNOWN

    def differ(self) -> bool:
        """Report whether a launched replay reads other numbers, once it has noted that."""
        note = self._note.numpy()
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
            while note[0] == _UNKNOWN and not stream.query():
                # Other threads make batches meanwhile.
                time.sleep(0)
        return bool(note[0] != 0)


def _read_now(number: Tensor) -> Any:
    """Read a number, also where waits are refused."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(0)
    try:
        return number.item()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
