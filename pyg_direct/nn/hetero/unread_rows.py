"""Rows in the results of layers that nothing in a recorded pass reads, so that it does not compute them.

A model whose result has one type discards the rows of other types in its last layer, and often in earlier layers too. A
model that trims its layers to what the next one reads discards the outermost hop of each type. PyG computes all.
`RowsOfPass` follows tensors through a trial pass. A pass in its `leave_out` block computes no relation into unread
types. Of other types it gives a model tensors that stand for all rows, but hold the first ones, which it reads.

Under autocast, matrices of the next layer read rounded rows. A layer writes these at once if the model passes its
results through a ReLU, and nothing else reads them (`find_relus`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
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
        has_relu: True if results have passed the ReLU that follows, in the dtype that matrices read.
    """

    number: int
    unused: frozenset[str]
    num_read: Mapping[str, int]
    has_relu: bool = False


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
        # Calls whose results have passed a ReLU. Of the last pass: calls that could do so, calls whose results such
        # calls read after a ReLU, and calls whose results others read too.
        self._relus: frozenset[int] = frozenset()
        self._able: set[int] = set()
        self._read: set[int] = set()
        self._read_by_others: set[int] = set()
        # The call that runs, and those whose results it reads.
        self._call: LayerCall | None = None
        self._sources: set[int] = set()
        self._changes = True
        # Nodes of autograd that made results of calls.
        self._nodes: dict[Any, _Source] = {}

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
        self._able, self._read, self._read_by_others, self._nodes = set(), set(), set(), {}
        with self._active(), _Narrowing(self):
            yield

    @contextmanager
    def _active(self) -> Iterator[None]:
        self._calls, self._call = 0, None
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

    def find_relus(self, results: Iterable[Tensor]) -> bool:
        """Find the calls of the last pass, with these results, whose results can pass the ReLU that follows; return if
        there are any.
        """
        results = list(results)
        self._note_others(results)
        # Functions of our own are no functions of torch.
        for node, earlier in _list_steps(results):
            source = self._nodes.get(earlier)
            if source is not None and node not in self._nodes and not (source.has_relu and _is_product(node)):
                self._read_by_others.add(source.call)
        self._nodes = {}
        self._relus = frozenset(self._able & self._read - self._read_by_others)
        return bool(self._relus)

    def forget_relus(self) -> None:
        """Undo `find_relus`."""
        self._relus = frozenset()

    def begin_call(self, given: Iterable[Any] = (), *, changes: bool = True) -> LayerCall:
        """Return the next call of a layer.

        Args:
            given: Rows that the layer reads.
            changes: True if the layer may change sums before it gives them.
        """
        number, self._calls = self._calls, self._calls + 1
        if self._follower is not None:
            return LayerCall(number, frozenset(), {})
        self._sources, self._changes = set(), changes
        for rows in given:
            source = _find_source(rows)
            if source is not None and source.has_relu:
                self._sources.add(source.call)
            elif source is not None:
                self._read_by_others.add(source.call)
        self._call = LayerCall(number, frozenset(self._unused.get(number, ())), self._num_read.get(number, {}),
                               number in self._relus)  # fmt: skip
        return self._call

    def note_products(self, *, may_relu: bool) -> bool:
        """Note that matrices alone read the rows of the call that runs; return if its results pass a ReLU.

        Args:
            may_relu: True if they could.
        """
        if self._call is None:
            return False
        self._read |= self._sources
        self._sources = set()
        may_relu = may_relu and not self._changes
        if may_relu:
            self._able.add(self._call.number)
        return may_relu and self._call.has_relu

    def mark(self, rows: Tensor, source: _Source) -> None:
        """Mark rows as results of a call."""
        setattr(rows, _SOURCE, source)
        if rows.grad_fn is not None:
            self._nodes[rows.grad_fn] = source

    def _note_others(self, values: Iterable[Any]) -> None:
        """Note what others than layers read."""
        for value in values:
            source = _find_source(value)
            if source is not None:
                self._read_by_others.add(source.call)

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
        self._call = None
        self._read_by_others |= self._sources
        for kind, rows in out.items():
            if rows is None:
                continue
            count = self._shapes[number, kind][0] if kind in call.num_read else len(rows)
            made = rows
            if call.has_relu and number in self._able:
                made = _stand_in(rows, count, self._find_filler(torch.float32, rows.device), has_relu=True)
            elif len(rows) < count:
                made = _stand_in(rows, count, self._find_filler(rows.dtype, rows.device))
            out[kind] = made
            self.mark(made, _Source(number, False))
        unused = self._unused.get(number)
        if not unused:
            return out
        return {kind: torch.full(unused[kind].shape, self._value, dtype=unused[kind].dtype, device=unused[kind].device)
                if kind in unused else out.get(kind) for kind in self._kinds[number]}  # fmt: skip

    def _find_filler(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the number in the place of rows that are not computed, made once for a pass."""
        key = dtype, device
        if key not in self._fillers:
            self._fillers[key] = torch.full((), self._value, dtype=dtype, device=device)
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
_RELUS = frozenset((torch.relu, Tensor.relu, F.relu))
# Methods and attributes that read no numbers.
_FORMS = frozenset(("__get__", "__len__", "dim", "size", "numel", "stride", "is_floating_point", "is_contiguous",
                    "element_size", "get_device"))  # fmt: skip
# Attributes of a tensor that stands for more rows, and of results of layers.
_HELD, _SOURCE = "_held_rows", "_source_of_rows"


class _Held(NamedTuple):
    """The first of the rows that a tensor stands for, and the number in the place of the others.

    Attributes:
        has_relu: True if they have passed a ReLU that the tensor has not.
    """

    rows: Tensor
    filler: Tensor
    has_relu: bool = False


class _Source(NamedTuple):
    """Call whose results, or their first rows, a tensor has; after a ReLU or before."""

    call: int
    has_relu: bool


def _list_steps(results: Iterable[Tensor]) -> Iterator[tuple[Any, Any]]:
    """List nodes of autograd, each with every node whose results it reads."""
    nodes, seen = [part.grad_fn for part in results], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for earlier, _ in node.next_functions:
            yield node, earlier
            nodes.append(earlier)


def _is_product(node: Any) -> bool:
    """Report whether a node is of products of a layer (`projection.py`)."""
    return type(node).__name__ == "_ProjectBackward"


def _find_source(rows: Any) -> _Source | None:
    source: _Source | None = rows.__dict__.get(_SOURCE) if type(rows) is Tensor else None
    return source


class _StandIn(Function):
    """Rows that stand for more of them, without memory for these."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, num_rows: int, filler: Tensor) -> Tensor:
        ctx.count = len(rows)
        return filler.detach().expand(num_rows, *rows.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[: ctx.count], None, None


def _stand_in(rows: Tensor, num_rows: int, filler: Tensor, *, has_relu: bool = False) -> Tensor:
    made: Tensor = _StandIn.apply(rows, num_rows, filler)
    setattr(made, _HELD, _Held(rows, filler, has_relu))
    return made


class _Narrowing(TorchFunctionMode):
    """Gives the first rows of a tensor that stands for more, which holds them; functions by row compute these alone.

    Args:
        of_pass: Is told which results of layers are read by others than layers.
    """

    def __init__(self, of_pass: RowsOfPass) -> None:
        super().__init__()
        self._of_pass = of_pass

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given: Any = args[0] if args else None
        source = _find_source(given)
        made = self._call(func, given, args, kwargs)
        if self._of_pass._call is not None or getattr(func, "__name__", "") in _FORMS:
            return made
        if source is not None and not source.has_relu and func in _RELUS and len(args) == 1:
            self._of_pass.mark(made, _Source(source.call, True))
        elif source is not None and _count_first(func, given, *args[1:], **kwargs) is not None:
            self._of_pass.mark(made, source)
        else:
            self._of_pass._note_others(tree_leaves((args, kwargs)))
        return made

    def _call(self, func: Any, given: Any, args: Any, kwargs: Any) -> Any:
        held: _Held | None = given.__dict__.get(_HELD) if type(given) is Tensor else None
        if held is None:
            return func(*args, **kwargs)
        if held.has_relu:
            return self._call_before_relu(held, func, given, args, kwargs)
        if func in _BY_ROW and not any(isinstance(part, Tensor) for part in tree_leaves((args[1:], kwargs))):
            made = func(held.rows, *args[1:], **kwargs)
            return _stand_in(made, len(given), held.filler.to(made.dtype))
        count = _count_first(func, given, *args[1:], **kwargs)
        if count is None or count > len(held.rows):
            return func(*args, **kwargs)
        return held.rows if count == len(held.rows) else held.rows.narrow(0, 0, count)

    def _call_before_relu(self, held: _Held, func: Any, given: Tensor, args: Any, kwargs: Any) -> Any:
        """Call a function of rows that have passed the ReLU that follows."""
        if func in _RELUS and len(args) == 1:
            if len(given) == len(held.rows):
                return held.rows
            return _stand_in(held.rows, len(given), held.filler.to(held.rows.dtype))
        count = _count_first(func, given, *args[1:], **kwargs)
        if count is None:
            return func(*args, **kwargs)
        rows = held.rows if count >= len(held.rows) else held.rows.narrow(0, 0, count)
        return _stand_in(rows, count, held.filler, has_relu=True)


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
