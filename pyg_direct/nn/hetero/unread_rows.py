"""Rows in the results of layers that nothing in a recorded pass reads, so that it does not compute them.

A model whose result has one type discards the rows of other types in its last layer, and often in earlier layers too. A
model that trims its layers to what the next one reads discards the outermost hop of each type. PyG computes all.
`RowsOfPass` follows tensors through a trial pass. A pass in its `leave_out` block computes no relation into unread
types. Of other types it gives a model tensors that stand for all rows, but hold the first ones, which it reads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Rows(NamedTuple):
    """Rows of a type in the result of a layer: the call of the layer within the pass, and their form."""

    call: int
    kind: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class LayerCall(NamedTuple):
    """Call of a layer within a pass.

    Attributes:
        unused: Types that it leaves out.
        num_read: Of types of which not all rows are read, how many are, the first ones.
    """

    number: int
    unused: frozenset[str]
    num_read: Mapping[str, int]


class RowsOfPass:
    """Rows in the results of the layers of a pass, by the order of their calls."""

    def __init__(self) -> None:
        self._rows: list[_Rows] = []
        # Unused types by call, rows that are read of others, and all types of the call in their order.
        self._unused: dict[int, dict[str, _Rows]] = {}
        self._num_read: dict[int, dict[str, int]] = {}
        self._kinds: dict[int, list[str]] = {}
        self._shapes: dict[tuple[int, str], torch.Size] = {}
        self._calls = 0
        self._follower: _Follower | None = None
        self._value = 0.0
        # Number in the place of rows that are not computed, by dtype and device.
        self._fillers: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Follow the results of layers through the pass of this block."""
        self._rows, self._follower = [], _Follower()
        with self._active(), self._follower:
            yield

    @contextmanager
    def leave_out(self, value: float = 0.0) -> Iterator[None]:
        """Leave out unread rows in the pass of this block.

        Args:
            value: Number in the place of each of theirs.
        """
        self._follower, self._value = None, value
        with self._active(), _Narrowing() if self._num_read else nullcontext():
            yield

    @contextmanager
    def _active(self) -> Iterator[None]:
        self._calls = 0
        before, _current.rows = _current.rows, self
        try:
            yield
        finally:
            _current.rows, self._fillers = before, {}

    def find_unread(self, results: Iterable[Tensor]) -> bool:
        """Find the types and rows on which these results of the followed pass do not depend; return if there are
        any.
        """
        assert self._follower is not None, "a pass was followed"
        used = self._follower.find_sources(results)
        self._unused, self._num_read = {}, {}
        for number, rows in enumerate(self._rows):
            self._shapes[rows.call, rows.kind] = rows.shape
            if not used >> number & 1:
                self._unused.setdefault(rows.call, {})[rows.kind] = rows
            elif self._follower.num_read.get(number, 0) < rows.shape[0]:
                self._num_read.setdefault(rows.call, {})[rows.kind] = self._follower.num_read.get(number, 0)
        self._follower = None
        return bool(self._unused or self._num_read)

    def keep_rows(self) -> bool:
        """Leave out whole types alone from now on; return if there are any, and rows were left out before."""
        had_rows, self._num_read = bool(self._num_read), {}
        return had_rows and bool(self._unused)

    def begin_call(self) -> LayerCall:
        """Return the next call of a layer."""
        number, self._calls = self._calls, self._calls + 1
        if self._follower is not None:
            return LayerCall(number, frozenset(), {})
        return LayerCall(number, frozenset(self._unused.get(number, ())), self._num_read.get(number, {}))

    def end_call(self, call: LayerCall, out: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Return the results of a layer's call, with tensors in the place of types and rows that were left out."""
        number = call.number
        if self._follower is not None:
            self._kinds[number] = list(out)
            for kind, rows in out.items():
                # HGTConv gives no rows to some types without edges.
                if rows is not None:
                    self._follower.mark(rows, len(self._rows))
                    self._rows.append(_Rows(number, kind, rows.shape, rows.dtype, rows.device))
            return out
        for kind in call.num_read:
            rows = out.get(kind)
            if rows is not None and len(rows) < self._shapes[number, kind][0]:
                out[kind] = _stand_in(rows, self._shapes[number, kind][0], self._find_filler(rows))
        unused = self._unused.get(number)
        if not unused:
            return out
        return {kind: torch.full(unused[kind].shape, self._value, dtype=unused[kind].dtype, device=unused[kind].device)
                if kind in unused else out.get(kind) for kind in self._kinds[number]}  # fmt: skip

    def _find_filler(self, like: Tensor) -> Tensor:
        """Return the number in the place of rows that are not computed, made once for a pass."""
        key = like.dtype, like.device
        if key not in self._fillers:
            self._fillers[key] = torch.full((), self._value, dtype=like.dtype, device=like.device)
        return self._fillers[key]


class _Current(threading.local):
    rows: RowsOfPass | None = None


_current = _Current()


def find_rows_of_pass() -> RowsOfPass | None:
    """Return what is known of the rows of the pass of this thread; None outside of recordings."""
    return _current.rows


def drop_relations(edges: Mapping[Any, Any], kinds: frozenset[str]) -> dict[Any, Any]:
    """Return what is given by relation, without the relations into types."""
    return {key: value for key, value in edges.items() if not (isinstance(key, tuple) and key[-1] in kinds)}


# Functions whose rows depend on the same rows of their first argument alone, and the operators that they lead to.
_BY_ROW = frozenset((torch.relu, Tensor.relu, F.relu, F.leaky_relu, F.elu, F.gelu, F.silu, torch.tanh, Tensor.tanh,
                     torch.sigmoid, Tensor.sigmoid, Tensor.to, Tensor.float, Tensor.bfloat16, Tensor.half))  # fmt: skip
_aten = torch.ops.aten
_OPERATORS_BY_ROW = frozenset((_aten.relu.default, _aten.leaky_relu.default, _aten.elu.default, _aten.gelu.default,
                               _aten.silu.default, _aten.tanh.default, _aten.sigmoid.default,
                               _aten._to_copy.default))  # fmt: skip
_NARROWS = frozenset((torch.narrow, Tensor.narrow))
# Attribute of a tensor that stands for more rows.
_HELD = "_held_rows"


class _Held(NamedTuple):
    """The first of the rows that a tensor stands for, and the number in the place of the others."""

    rows: Tensor
    filler: Tensor


class _StandIn(Function):
    """Rows that stand for more of them, without memory for these."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, num_rows: int, filler: Tensor) -> Tensor:
        ctx.count = len(rows)
        return filler.detach().expand(num_rows, *rows.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[: ctx.count], None, None


def _stand_in(rows: Tensor, num_rows: int, filler: Tensor) -> Tensor:
    made: Tensor = _StandIn.apply(rows, num_rows, filler)
    setattr(made, _HELD, _Held(rows, filler))
    return made


class _Narrowing(TorchFunctionMode):
    """Gives the first rows of a tensor that stands for more, which holds them; functions by row compute these alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given: Any = args[0] if args else None
        held: _Held | None = given.__dict__.get(_HELD) if type(given) is Tensor else None
        if held is None:
            return func(*args, **kwargs)
        if func in _BY_ROW and not any(isinstance(part, Tensor) for part in tree_leaves((args[1:], kwargs))):
            made = func(held.rows, *args[1:], **kwargs)
            return _stand_in(made, len(given), held.filler.to(made.dtype))
        count = _count_first(func, given, *args[1:], **kwargs)
        if count is None or count > len(held.rows):
            return func(*args, **kwargs)
        return held.rows if count == len(held.rows) else held.rows.narrow(0, 0, count)


def _count_first(func: Any, rows: Tensor, *args: Any, **kwargs: Any) -> int | None:
    """Return how many rows a function gives, if these are the first; None for any other function."""
    if func in _NARROWS:
        dim, start, length = (kwargs.get(name, args[i] if i < len(args) else None)
                              for i, name in enumerate(("dim", "start", "length")))  # fmt: skip
        is_first = dim in (0, -rows.dim()) and type(start) is int and start == 0 and type(length) is int
        return length if is_first else None
    if func is not Tensor.__getitem__ or type(args[0]) is not slice:
        return None
    index = args[0]
    if any(type(part) not in (int, type(None)) for part in (index.start, index.stop, index.step)):
        return None
    start, stop, step = index.indices(len(rows))
    return max(stop, 0) if start == 0 and step == 1 else None


class _Span(NamedTuple):
    """Rows under one mark, or rows made of these one by one: their memory in bytes."""

    number: int
    begin: int
    row_bytes: int
    num_rows: int

    @classmethod
    def of(cls, number: int, rows: Tensor) -> _Span:
        """Describe contiguous rows."""
        row_bytes = rows.numel() // len(rows) * rows.element_size()
        return cls(number, int(rows.storage_offset()) * rows.element_size(), row_bytes, len(rows))

    def count_rows(self, part: Tensor) -> int:
        """Return how many of the first rows hold all that a tensor of the same memory has of them."""
        if part.numel() == 0:
            return 0
        first = part.storage_offset()
        last = first + sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
        begin, end = first * part.element_size() - self.begin, (last + 1) * part.element_size() - self.begin
        if end <= 0 or begin >= self.num_rows * self.row_bytes:
            return 0
        return min(self.num_rows, -(-end // self.row_bytes))


class _Follower(TorchDispatchMode):
    """Marks on the memory of tensors, which operations pass on from what they read to what they write.

    Attributes:
        num_read: Of the rows under a mark, how many of the first hold all that is read.
    """

    def __init__(self) -> None:
        super().__init__()
        # By storage, one bit a mark. Memory that is given free and taken again gets the marks of its new owner.
        self._marks: dict[int, int] = {}
        self._spans: dict[int, list[_Span]] = {}
        self._made: set[int] = set()
        # Marks that reached the host, or memory from before the pass.
        self._escaped = 0
        self.num_read: dict[int, int] = {}

    def mark(self, tensor: Tensor, number: int) -> None:
        """Put a mark on a tensor."""
        place = _find_place(tensor)
        self._marks[place] = self._marks.get(place, 0) | 1 << number
        if tensor.dim() > 0 and tensor.numel() > 0 and tensor.is_contiguous():
            self._spans.setdefault(place, []).append(_Span.of(number, tensor))
        else:
            self.num_read[number] = len(tensor) if tensor.dim() > 0 else 1

    def find_sources(self, results: Iterable[Tensor]) -> int:
        """Return the marks on tensors, and those that escaped."""
        marks = self._escaped
        for tensor in results:
            marks |= self._marks.get(_find_place(tensor), 0)
            self._note_read(tensor)
        return marks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [part for part in tree_leaves((args, kwargs)) if isinstance(part, Tensor)]
        dense = [part for part in given if part.layout is torch.strided]
        marks = 0
        for part in dense:
            marks |= self._marks.get(_find_place(part), 0)
        out = func(*args, **kwargs)
        made = [part for part in tree_leaves(out) if isinstance(part, Tensor)]
        if not made or len(dense) < len(given) or any(part.layout is not torch.strided for part in made):
            self._escaped |= marks
        before = {_find_place(part) for part in dense}
        writes = func._schema.is_mutable
        laid = [part for part in made if part.layout is torch.strided]
        # A view reads nothing.
        passed = []
        if writes or len(laid) < len(made) or not made or any(_find_place(part) not in before for part in made):
            passed = self._find_passed(func, dense, laid)
        for place in {*map(_find_place, laid), *(before if writes else ())}:
            if place not in before:
                self._marks[place], self._spans[place] = marks, passed
                self._made.add(place)
                continue
            # A view has the marks of its memory; what is written may be any of the arguments.
            self._marks[place] = self._marks.get(place, 0) | marks
            if writes and place not in self._made:
                self._escaped |= marks
        return out

    def _find_passed(self, func: Any, dense: list[Tensor], made: list[Tensor]) -> list[_Span]:
        """Note what an operator reads; return spans of its result instead if it makes rows of rows one by one."""
        is_by_row = (
            func in _OPERATORS_BY_ROW
            and len(dense) == len(made) == 1
            and made[0].shape == dense[0].shape
            and made[0].numel() > 0
            and all(part.is_contiguous() for part in (*dense, *made))
        )
        if not is_by_row:
            for part in dense:
                self._note_read(part)
            return []
        passed, part = [], dense[0]
        for span in self._spans.get(_find_place(part), ()):
            own = _Span.of(span.number, part)
            if (own.begin, own.row_bytes) == (span.begin, span.row_bytes):
                passed.append(_Span.of(span.number, made[0]))
            else:
                self._note_rows(span, part)
        return passed

    def _note_read(self, part: Tensor) -> None:
        for span in self._spans.get(_find_place(part), ()):
            self._note_rows(span, part)

    def _note_rows(self, span: _Span, part: Tensor) -> None:
        self.num_read[span.number] = max(self.num_read.get(span.number, 0), span.count_rows(part))


def _find_place(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
