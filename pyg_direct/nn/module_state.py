"""Attributes that an acceleration adds to a user's module, and keeps out of its pickles.

A module that is pickled, alone or within a checkpoint, must load without this package. So its pickle holds PyG's class
and the program's attributes, but nothing of pyg_direct. Deep copies stay accelerated. Shallow copies and the replicas
of `DataParallel` share a dictionary with the module. Its bound methods would compute with the parameters of the first
module, so these copies take PyG's own code.
"""

from __future__ import annotations

import copy
from types import FunctionType, MethodType
from typing import Any

import torch

# Names of the attributes attached to a module.
_NAMES = "_attached_names"


def attach(module: torch.nn.Module, **values: Any) -> None:
    """Attach attributes to a module, which none of its pickles holds.

    Args:
        module: It is changed in place.
        values: Attributes by name; a function becomes a method, bound to the module.
    """
    own = module.__dict__
    for name, value in {**values, **_GUARDS}.items():
        own[name] = MethodType(value, module) if isinstance(value, FunctionType) else value
    # Copies share attributes that are not replaced.
    own[_NAMES] = own.get(_NAMES, frozenset()) | values.keys()


def is_attached(module: Any, name: str, value: Any) -> bool:
    """Report whether an attribute of a module is this function, attached as its method."""
    return getattr(module.__dict__.get(name), "__func__", None) is value


def detach(module: torch.nn.Module, *names: str) -> None:
    """Remove attributes that were attached to a module; other attributes of these names stay.

    Args:
        module: It is changed in place.
    """
    own = module.__dict__
    left = own.get(_NAMES, frozenset())
    if left.isdisjoint(names):
        return
    for name in left & set(names):
        own.pop(name, None)
    own[_NAMES] = left - set(names)
    if not own[_NAMES]:
        for name in (_NAMES, *_GUARDS):
            own.pop(name, None)


def detach_all(module: torch.nn.Module) -> None:
    """Remove all attributes that were attached to a module."""
    detach(module, *module.__dict__.get(_NAMES, ()))


def copy_plain(module: Any) -> Any:
    """Copy a module without the attached attributes; the copy has modules of its own, which are not copied.

    Under `install`, the copy was accelerated as it was made.
    """
    made = copy.copy(module)
    detach_all(made)
    made.__dict__["_modules"] = dict(made._modules)
    return made


def _reduce(self: Any, protocol: Any) -> Any:
    """Override `__reduce_ex__` of the module's class, without the attached attributes."""
    hidden = {_NAMES, *_GUARDS, *self.__dict__.get(_NAMES, ())}
    kind: Any = type(self)
    made = kind.__reduce_ex__(self, protocol)
    if not isinstance(made, tuple):
        return made
    make, args, *rest = made
    # Classes of `torch.fx` have their state among the arguments; classes with slots have it in a pair.
    return (make, _hide(args, hidden), *(_hide(part, hidden) if i == 0 else part for i, part in enumerate(rest)))


def _hide(state: Any, names: set[str]) -> Any:
    if type(state) is tuple:
        return tuple([_hide(part, names) for part in state])
    if isinstance(state, dict) and _NAMES in state:
        return {name: value for name, value in state.items() if name not in names}
    return state


def _copy_deeply(self: Any, memo: dict[int, Any]) -> Any:
    """Return a copy that is accelerated too: bound methods are copied with the module that they are bound to."""
    kind: Any = type(self)
    own = getattr(kind, "__deepcopy__", None)
    if own is not None:
        # As of a class that `torch.nn.utils.parametrize` made since.
        return own(self, memo)
    return copy._reconstruct(self, memo, *kind.__reduce_ex__(self, 4))  # type: ignore[attr-defined]


def _replicate(self: Any) -> Any:
    replica = type(self)._replicate_for_data_parallel(self)
    detach_all(replica)
    return replica


# Names that torch, `pickle` and `copy` look up on an instance before its class.
_GUARDS = {"__reduce_ex__": _reduce, "__deepcopy__": _copy_deeply, "_replicate_for_data_parallel": _replicate}
# Attributes that `attach` adds to those that it is given.
GUARD_NAMES = frozenset((_NAMES, *_GUARDS))
