"""Models of programs that run unedited: PyG's convolutions are accelerated as they are made, loaded or copied."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch_geometric.nn import HeteroConv
from torch_geometric.nn.models.basic_gnn import BasicGNN

from pyg_direct.nn.accelerate import KINDS, accelerate_one
from pyg_direct.nn.joined import watch_relations
from pyg_direct.nn.trimmed import watch_trimming

# What an object is made with, and what it comes out of a pickle with.
_METHODS = ("__init__", "__setstate__")
# Methods of classes that were replaced, and what the class itself had under the name: None if it inherits it.
_REPLACED: list[tuple[type, str, Callable[..., None] | None]] = []


def accelerate_what_is_made() -> None:
    """Accelerate every convolution, and every model of PyG's, that is made or loaded from now on."""
    for kind in KINDS:
        _extend(kind, accelerate_one)
    _extend(BasicGNN, watch_trimming)
    _extend(HeteroConv, watch_relations)


def leave_what_is_made() -> None:
    """The opposite; what was made stays as it is."""
    while _REPLACED:
        kind, name, own = _REPLACED.pop()
        if own is None:
            delattr(kind, name)
        else:
            setattr(kind, name, own)


def _extend(kind: type, change: Callable[[Any], object]) -> None:
    """Let the methods of a class that fill an object end with a change of it."""
    for name in _METHODS:
        method = getattr(kind, name)
        _REPLACED.append((kind, name, vars(kind).get(name)))
        setattr(kind, name, _follow(method, change))


def _follow(method: Callable[..., None], change: Callable[[Any], object]) -> Callable[..., None]:
    @functools.wraps(method)
    def extended(self: Any, *args: Any, **kwargs: Any) -> None:
        method(self, *args, **kwargs)
        change(self)

    return extended
