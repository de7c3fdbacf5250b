"""Types in the results of HeteroConv and HGTConv that a recorded pass leaves out, as nothing in it depends on them.

A model whose result has one type discards the rows of other types in its last layer, and often in earlier layers too.
PyG computes all. `TypesOfPass` follows tensors through a trial pass and finds these types. A pass in its `leave_out`
block computes no relation into them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Rows(NamedTuple):
    """Rows of a type in the result of a layer: the call of the layer within the pass, and their form."""

    call: int
    kind: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class TypesOfPass:
    """Types in the results of the layers of a pass, by the order of their calls."""

    def __init__(self) -> None:
        self._rows: list[_Rows] = []
        # Unused ones by call, and all types of the call in their order.
        self._unused: dict[int, dict[str, _Rows]] = {}
        self._kinds: dict[int, list[str]] = {}
        self._calls = 0
        self._follower: _Follower | None = None
        self._value = 0.0

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Follow the results of layers through the pass of this block."""
        self._rows, self._follower = [], _Follower()
        with self._active(), self._follower:
            yield

    @contextmanager
    def leave_out(self, value: float = 0.0) -> Iterator[None]:
        """Leave out unused types in the pass of this block.

        Args:
            value: Number in the place of each of theirs.
        """
        self._follower, self._value = None, value
        with self._active():
            yield

    @contextmanager
    def _active(self) -> Iterator[None]:
        self._calls = 0
        before, _current.types = _current.types, self
        try:
            yield
        finally:
            _current.types = before

    def find_unused(self, results: Iterable[Tensor]) -> bool:
        """Find the types on which these results of the followed pass do not depend; return if there are any."""
        assert self._follower is not None, "a pass was followed"
        used = self._follower.find_sources(results)
        self._unused = {}
        for number, rows in enumerate(self._rows):
            if not used >> number & 1:
                self._unused.setdefault(rows.call, {})[rows.kind] = rows
        self._follower = None
        return bool(self._unused)

    def begin_call(self) -> tuple[int, frozenset[str]]:
        """Return the number of a layer's call, and the types that it leaves out."""
        number, self._calls = self._calls, self._calls + 1
        return number, frozenset(() if self._follower is not None else self._unused.get(number, ()))

    def end_call(self, number: int, out: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Return the results of a layer's call with rows in the place of types that were left out."""
        if self._follower is not None:
            self._kinds[number] = list(out)
            for kind, rows in out.items():
                # HGTConv gives no rows to some types without edges.
                if rows is not None:
                    self._follower.mark(rows, len(self._rows))
                    self._rows.append(_Rows(number, kind, rows.shape, rows.dtype, rows.device))
            return out
        unused = self._unused.get(number)
        if not unused:
            return out
        return {kind: torch.full(unused[kind].shape, self._value, dtype=unused[kind].dtype, device=unused[kind].device)
                if kind in unused else out.get(kind) for kind in self._kinds[number]}  # fmt: skip


class _Current(threading.local):
    types: TypesOfPass | None = None


_current = _Current()


def find_types_of_pass() -> TypesOfPass | None:
    """Return what is known of the types of the pass of this thread; None outside of recordings."""
    return _current.types


def drop_relations(edges: Mapping[Any, Any], kinds: frozenset[str]) -> dict[Any, Any]:
    """Return what is given by relation, without the relations into types."""
    return {key: value for key, value in edges.items() if not (isinstance(key, tuple) and key[-1] in kinds)}


class _Follower(TorchDispatchMode):
    """Marks on the memory of tensors, which operations pass on from what they read to what they write."""

    def __init__(self) -> None:
        super().__init__()
        # By storage, one bit a mark. Memory that is given free and taken again gets the marks of its new owner.
        self._marks: dict[int, int] = {}
        self._made: set[int] = set()
        # Marks that reached the host, or memory from before the pass.
        self._escaped = 0

    def mark(self, tensor: Tensor, number: int) -> None:
        """Put a mark on a tensor."""
        place = _find_place(tensor)
        self._marks[place] = self._marks.get(place, 0) | 1 << number

    def find_sources(self, results: Iterable[Tensor]) -> int:
        """Return the marks on tensors, and those that escaped."""
        marks = self._escaped
        for tensor in results:
            marks |= self._marks.get(_find_place(tensor), 0)
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
        for place in {*map(_find_place, [part for part in made if part.layout is torch.strided]),
                      *(before if writes else ())}:  # fmt: skip
            if place not in before:
                self._marks[place] = marks
                self._made.add(place)
                continue
            # A view has the marks of its memory; what is written may be any of the arguments.
            self._marks[place] = self._marks.get(place, 0) | marks
            if writes and place not in self._made:
                self._escaped |= marks
        return out


def _find_place(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
