"""`LazyDict`: a dictionary whose items, such as views of a batch's memory, are made at the first use."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from pyg_direct.runtime.host.tensor_views import ordinary_tensors

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
# Of all dictionaries: their items are made in microseconds, by one thread.
_MAKING = threading.RLock()
if hasattr(os, "register_at_fork"):
    # A thread of the parent may hold it.
    os.register_at_fork(after_in_child=lambda: globals().update(_MAKING=threading.RLock()))


class _Made(dict[_Key, _Value]):
    """Dictionary that is copied and pickled as one of Python's own."""

    __slots__ = ("_make",)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)


class LazyDict(_Made[_Key, _Value]):
    """Dictionary whose items are made at the first use; afterwards it is as fast as any."""

    __slots__ = ()

    def __init__(self, make: Callable[[], Mapping[_Key, _Value]]) -> None:
        self._make: Callable[[], Mapping[_Key, _Value]] = make

    def when_made(self, change: Callable[[Mapping[_Key, _Value]], None]) -> None:
        """Change the items of a dictionary that was not used yet, as soon as they are made."""
        make = self._make

        def make_changed() -> Mapping[_Key, _Value]:
            items = make()
            change(items)
            return items

        self._make = make_changed

    def _fill(self) -> None:
        with _MAKING:
            if type(self) is LazyDict:
                if torch.is_inference_mode_enabled():
                    with ordinary_tensors():
                        items = self._make()
                else:
                    items = self._make()
                dict.update(self, items)
                # Last: another thread may look meanwhile.
                self._make, self.__class__ = _none, _Made  # type: ignore[assignment]


def _none() -> dict[Any, Any]:
    return {}


def _filled(name: str) -> Callable[..., Any]:
    """Return a method of `dict` that makes the items first."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if type(self) is LazyDict:
            self._fill()
        return getattr(_Made, name)(self, *args, **kwargs)

    return method


for _name in ("__contains__", "__delitem__", "__eq__", "__getitem__", "__ior__", "__iter__", "__len__", "__ne__",
              "__or__", "__reduce_ex__", "__repr__", "__reversed__", "__ror__", "__setitem__", "clear", "copy", "get",
              "items", "keys", "pop", "popitem", "setdefault", "update", "values"):  # fmt: skip
    setattr(LazyDict, _name, _filled(_name))
