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
# Functions of all rows that padding can only raise, or only lower.
_RISE = frozenset((_aten.any.default, _aten.count_nonzero.default))
_FALL = frozenset((_aten.all.default,))
_INVERTS = frozenset((_aten.logical_not.default, _aten.bitwise_not.default))
_FILLS = frozenset((_aten.index_put.default, _aten.index_put_.default))
# Note on the host before a replay has made it.
_UNKNOWN = -1


class AnswersDiffer(Exception):
    """Signal that a replayed pass would have read other numbers than the recorded one."""


class HostReads(TorchDispatchMode):
    """Numbers that the passes of this block read on the host: learned in the first one, and given in the others.

    Assignments under a mask, such as `x[mask] = value`, are done for all rows, as a count of rows would be read.

    Args:
        device: Of the passes.
        num_rows: Numbers of rows that hold padding; None if nothing does. Padding must not decide a number. Of all
            such rows, a number may tell whether any or all fulfil a condition, and only if padding cannot change that.

    Attributes:
        answers: Numbers in their order; None before they are known.
        is_needed: True if passes run in this block: until it is known that nothing is read or assigned so.
    """

    def __init__(self, device: torch.device, num_rows: Collection[int] | None) -> None:
        super().__init__()
        self._device, self._num_rows = device, num_rows
        self.answers: list[Any] | None = None
        self.is_needed = False
        self._learned: list[Any] = []
        self._fills = self._place = 0
        # Of numbers of the pass, whether padding can only raise them; otherwise it can only lower them.
        self._rises: dict[int, tuple[Tensor, bool]] = {}
        self._differs = torch.zeros(1, dtype=torch.int32, device=device)
        self._note = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        # Read without an operation of torch.
        self._noted = self._note.numpy()

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
        if self.answers is None:
            self.answers, self.is_needed = self._learned, bool(self._learned or self._fills)
        elif self._place != len(self.answers):
            raise RuntimeError("forward reads more numbers on the host in one pass than in another")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _READ and args[0].device == self._device:
            return self._read(args[0])
        if func in _FILLS:
            filled = _fill(*args, **kwargs)
            if filled is not None:
                self._fills += 1
                return args[0].copy_(filled) if func is _aten.index_put_.default else filled
        out = func(*args, **kwargs)
        if self._num_rows is not None:
            self._follow(func, args, out)
        return out

    def _follow(self, func: Any, args: Any, out: Any) -> None:
        """Note whether padding can only raise a number, or only lower it."""
        if func in _RISE or func in _FALL:
            if args[0].dim() > 0 and args[0].shape[0] in (self._num_rows or ()):
                # Held, so that its id is given to no other.
                self._rises[id(out)] = out, func in _RISE
        elif func in _INVERTS and id(args[0]) in self._rises:
            self._rises[id(out)] = out, not self._rises[id(args[0])][1]

    def _read(self, number: Tensor) -> Any:
        if self.answers is None:
            answer = _read_now(number)
            if self._num_rows is not None and self._rises.get(id(number), (number, bool(answer)))[1] == bool(answer):
                raise RuntimeError("forward reads a number on the host which padding may change")
            self._learned.append(answer)
            return answer
        if self._place == len(self.answers):
            raise RuntimeError("forward reads more numbers on the host in one pass than in another")
        answer = self.answers[self._place]
        self._place += 1
        # One that is no number stays so.
        differs = number == number if answer != answer else number != answer
        self._differs.logical_or_(differs)
        if self._place == len(self.answers):
            # The host learns it while the rest of the pass runs.
            self._note.copy_(self._differs, non_blocking=True)
        return answer

    def expect(self) -> None:
        """Expect the note of a replay that is launched next."""
        self._noted[0] = _UNKNOWN

    def differ(self) -> bool:
        """Report whether a launched replay reads other numbers, once it has noted that."""
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
            while self._noted[0] == _UNKNOWN and not stream.query():
                # Other threads make batches meanwhile.
                time.sleep(0)
        return bool(self._noted[0] != 0)


def _read_now(number: Tensor) -> Any:
    """Read a number, also where waits are refused."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(0)
    try:
        return number.item()
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def _fill(rows: Tensor, indices: Any, value: Tensor, accumulate: bool = False) -> Tensor | None:
    """Return rows with a value in the place of those under a mask; None for any other assignment."""
    if accumulate or len(indices) != 1 or indices[0] is None or indices[0].dtype != torch.bool:
        return None
    mask, width = indices[0], rows.dim() - indices[0].dim()
    # A value for each row that is under the mask would depend on their number.
    if mask.device != rows.device or value.dim() > width:
        return None
    if value.device != rows.device and value.dim() > 0:
        return None
    return torch.where(mask.view(*mask.shape, *[1] * width), value.to(rows.dtype), rows)
