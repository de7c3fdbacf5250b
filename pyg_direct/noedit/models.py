"""Models of programs that run unedited: PyG's convolutions are accelerated as they are made."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch_geometric.nn import HeteroConv
from torch_geometric.nn.models.basic_gnn import BasicGNN

from pyg_direct.nn.accelerate import KINDS, accelerate_one
from pyg_direct.nn.joined import watch_relations
from pyg_direct.nn.trimmed import watch_trimming

# Classes whose `__init__` was replaced, and what it was.
_REPLACED: list[tuple[type, Callable[..., None]]] = []


def accelerate_what_is_made() -> None:
    """Accelerate every convolution, and every model of PyG's, that is made from now on."""
    for kind in KINDS:
        _extend(kind, accelerate_one)
    _extend(BasicGNN, watch_trimming)
    _extend(HeteroConv, watch_relations)


def leave_what_is_made() -> None:
    """The opposite; what was made stays as it is."""
    while _REPLACED:
        kind, init = _REPLACED.pop()
        kind.__init__ = init  # type: ignore[misc]


def _extend(kind: type, change: Callable[[Any], object]) -> None:
    """Let `__init__` of a class end with a change of the object."""
    init = kind.__init__  # type: ignore[misc]

    @functools.wraps(init)
    def extended(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        change(self)

    _REPLACED.append((kind, init))
    kind.__init__ = extended  # type: ignore[misc]
