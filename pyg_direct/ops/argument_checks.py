"""Argument checks before a launch; each error names the argument, the rule and the value.

`refuse_unknown` and `checks_keywords` report an option that a class does not take, with the option that was
probably meant.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from numbers import Real
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError

INDEX_DTYPES = (torch.int32, torch.int64)
MAX_KEY = 2**64 - 1
_MAX_FANOUT = 2**62
# Letters of a value that a message shows.
_SHORT = 80


def check_flag(name: str, value: Any) -> bool:
    """Return a switch as a bool: a bool of Python or NumPy, 0 or 1; None is False."""
    if value is None:
        return False
    if not isinstance(value, (bool, np.bool_)) and not (isinstance(value, (int, np.integer)) and value in (0, 1)):
        raise ArgumentTypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def check_count(name: str, value: Any, least: int = 1) -> int:
    """Check an integer of Python or NumPy, of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ArgumentError(f"{name} must be an integer of at least {least}, got {value!r}")
    return int(value)


def check_number(name: str, value: Any) -> float:
    """Check a real number of Python or NumPy, infinity and nan included."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ArgumentTypeError(f"{name} must be a number, got {value!r}")
    return float(value)


def check_choice(name: str, value: Any, known: Collection[Any]) -> None:
    """Check that a value is one of the known ones."""
    if value not in known:
        raise ArgumentError(f"{name} must be one of {', '.join(map(str, known))}, got {value!r}")


def in_short(value: Any) -> str:
    """Return a value as messages show it: tensors and arrays by shape, long values by their beginning."""
    if isinstance(value, (Tensor, np.ndarray)):
        kind = "a tensor" if isinstance(value, Tensor) else "an array"
        return f"{kind} of shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple)):
        shown = [*map(in_short, value[:4]), *(["..."] if len(value) > 4 else [])]
        ends = "[]" if isinstance(value, list) else "()"
        return ends[0] + ", ".join(shown) + ("," if len(value) == 1 and ends == "()" else "") + ends[1]
    if isinstance(value, Mapping):
        return f"a dict of {in_short(list(value))}"
    text = repr(value)
    return text if len(text) <= _SHORT else f"{text[:_SHORT]}..."


def tell_kind(value: Any) -> str:
    """Return an invalid value as messages show it: words as they are, other values by type."""
    return in_short(value) if value is None or isinstance(value, (str, bytes)) else type(value).__name__


def check_callables(**functions: Any) -> None:
    """Check that the user's functions, by argument, are callable or None."""
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise ArgumentTypeError(f"{name} must be callable or None, got {function!r}")


def check_ids(name: str, ids: Tensor, upper: int | None = None) -> Tensor:
    """Check 1-D int32 or int64 ids, and make them contiguous; ids on the CPU must lie in [0, upper).

    Ids on a GPU are not read here: kernels check them and the error is raised at the next wait for the GPU.
    """
    if not isinstance(ids, Tensor):
        raise ArgumentTypeError(f"{name} must be a tensor, got {type(ids).__name__}")
    if ids.dtype.is_floating_point and ids.shape == (0,):
        # torch makes a float tensor of an empty list.
        ids = ids.long()
    if ids.dtype not in INDEX_DTYPES:
        hint = ": give its .nonzero().view(-1)" if ids.dtype == torch.bool else ": give its .long()"
        if ids.dtype != torch.bool and ids.dim() == 1 and ids.numel() == upper:
            hint += ", or its .bool() if it is a mask"
        raise ArgumentTypeError(f"{name} must have dtype int64 or int32, got {ids.dtype}"
                                f"{'' if ids.is_complex() else hint}")  # fmt: skip
    if ids.dim() != 1:
        raise ArgumentError(f"{name} must have one dimension, got shape {tuple(ids.shape)}")
    if upper is not None and not ids.is_cuda and ids.numel() > 0:
        check_below(name, ids.detach().numpy(), upper)
    return ids.contiguous()


def are_below(ids: np.ndarray, upper: int) -> bool:
    """Report whether ids on the host, int32 or int64, lie in [0, upper), in one pass."""
    # As an unsigned number, a negative id is larger than any valid one.
    unsigned = ids.view(np.uint64 if ids.itemsize == 8 else np.uint32)
    return not ids.size or bool(np.maximum.reduce(unsigned) < upper)


def are_plain_ids(ids: Tensor, upper: int) -> bool:
    """Report whether ids are int64 `[n]` on the host, contiguous, in [0, upper): those need no other check."""
    return (ids.dtype is torch.int64 and ids.dim() == 1 and not ids.is_cuda and ids.is_contiguous()
            and are_below(ids.detach().numpy(), upper))  # fmt: skip


def check_below(name: str, ids: np.ndarray, upper: int) -> None:
    """Check ids on the host, int32 or int64: they must lie in [0, upper)."""
    if not are_below(ids, upper):
        raise IdError(f"{name} must lie in [0, {upper}), got {int(ids.min()) if ids.min() < 0 else int(ids.max())}")


def check_edge_list(name: str, edges: Tensor) -> None:
    """Check a list of edges: int64 or int32 `[2, E]`."""
    if not isinstance(edges, Tensor):
        raise ArgumentTypeError(f"{name} must be a tensor [2, E], got {type(edges).__name__}")
    if edges.layout != torch.strided or edges.dim() != 2 or edges.shape[0] != 2:
        is_turned = edges.layout == torch.strided and edges.dim() == 2 and edges.shape[1] == 2
        raise ArgumentError(f"{name} must have shape [2, E], got {tuple(edges.shape)} with layout {edges.layout}"
                            f"{': give its .t()' if is_turned else ''}")  # fmt: skip
    if edges.dtype not in INDEX_DTYPES:
        is_number = edges.dtype != torch.bool and not edges.is_complex()
        raise ArgumentTypeError(f"{name} must have dtype int64 or int32, got {edges.dtype}"
                                f"{': give its .long()' if is_number else ''}")  # fmt: skip


def as_ids(name: str, ids: Any) -> Tensor:
    """Return ids as a tensor, also from a list or an array."""
    if isinstance(ids, Tensor):
        return ids
    try:
        made = torch.as_tensor(ids, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentTypeError(f"{name} must be ids, got {in_short(ids)}") from error
    return made if made.numel() else made.long()


def check_integers(name: str, values: Tensor) -> None:
    """Check integers, such as times, that int64 holds."""
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        cure = ": give its .long()" if values.is_floating_point() else ""
        raise ArgumentTypeError(f"{name} must hold integers, got {values.dtype}{cure}")
    if values.dtype == torch.uint64:
        beyond = values.view(torch.int64) < 0
        if bool(beyond.any()):
            raise ArgumentError(f"{name} must be below 2**63, got {values[beyond][0].item()}")


def check_fanouts(name: str, fanouts: Sequence[int]) -> list[int]:
    """Check fanouts per hop: integers of Python or NumPy, each at least -1 (which takes all neighbors)."""
    if isinstance(fanouts, np.ndarray) and fanouts.ndim == 1:
        fanouts = fanouts.tolist()
    if isinstance(fanouts, (str, bytes)) or not isinstance(fanouts, Sequence):
        is_number = isinstance(fanouts, (int, np.integer)) and not isinstance(fanouts, bool)
        hint = f": give one for each hop, such as [{fanouts!r}]" if is_number else ""
        hint = ": give its .tolist()" if isinstance(fanouts, Tensor) else hint
        raise ArgumentTypeError(f"{name} must be a list of integers, got {in_short(fanouts)}{hint}")
    checked = []
    for fanout in fanouts:
        if isinstance(fanout, bool) or not isinstance(fanout, (int, np.integer)):
            raise ArgumentTypeError(f"{name} must hold integers, got {fanout!r}")
        if fanout < -1:
            raise ArgumentError(f"{name} must hold values of at least -1, got {fanout}")
        if fanout > _MAX_FANOUT:
            raise ArgumentError(f"{name} must hold values of at most 2**62, got {fanout}")
        checked.append(int(fanout))
    return checked


def check_key(name: str, key: int) -> int:
    """Check a key of draws: an unsigned 64-bit integer."""
    if isinstance(key, bool) or not isinstance(key, int):
        raise ArgumentTypeError(f"{name} must be an integer, got {key!r}")
    if not 0 <= key <= MAX_KEY:
        raise ArgumentError(f"{name} must lie in [0, 2**64), got {key}")
    return key


def check_same_device(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Check that both tensors live on one device."""
    if tensor.device != other.device:
        raise ArgumentError(f"{name} must be on the device of {other_name} ({other.device}), got {tensor.device}")


def check_topology_kinds(indptr: Tensor, indices: Tensor) -> None:
    """Check `indptr` int64 `[N + 1]` and `indices` int32 or int64 `[E]`, on one device; values are not read."""
    for name, array in (("indptr", indptr), ("indices", indices)):
        if not isinstance(array, Tensor):
            raise ArgumentTypeError(f"{name} must be a tensor, got {type(array).__name__}")
    check_same_device("indices", indices, "indptr", indptr)
    if indptr.dtype != torch.int64 or indptr.dim() != 1 or indptr.numel() == 0:
        raise ArgumentTypeError(
            f"indptr must be int64 with shape [N + 1], got {indptr.dtype} with shape {tuple(indptr.shape)}"
        )
    if indices.dtype not in INDEX_DTYPES or indices.dim() != 1:
        raise ArgumentTypeError(
            f"indices must be int32 or int64 with shape [E], got {indices.dtype} with shape {tuple(indices.shape)}"
        )


def check_topology(indptr: Tensor, indices: Tensor) -> None:
    """Check `indptr` int64 `[N + 1]`, not decreasing from 0 to E, and `indices` int32 or int64 `[E]` within [0, N)."""
    check_topology_kinds(indptr, indices)
    check_offsets(indptr, indices.numel())
    if indices.numel() > 0:
        low, high = (int(v) for v in torch.aminmax(indices))
        if low < 0 or high >= indptr.numel() - 1:
            raise IdError(f"indices must lie in [0, {indptr.numel() - 1}), got {low if low < 0 else high}")


def check_offsets(indptr: Tensor, num_edges: int, what: str = "edges") -> None:
    """Check that `indptr`, int64 `[N + 1]`, does not decrease from 0 to the number of edges; `what` names these."""
    first, last = (int(indptr[0]), int(indptr[-1])) if indptr.numel() > 0 else (0, -1)
    if first != 0 or last != num_edges:
        raise ArgumentError(f"indptr must run from 0 to the number of {what} {num_edges}, got {first} to {last}")
    if bool((indptr[1:] < indptr[:-1]).any()):
        row = int((indptr[1:] < indptr[:-1]).nonzero()[0])
        raise ArgumentError(f"indptr must not decrease, got {int(indptr[row])} before {int(indptr[row + 1])}")


Constructor = TypeVar("Constructor", bound=Callable[..., None])


def refuse_unknown(owner: type, given: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse options that a class does not know, and name the nearest known option.

    Args:
        given: Options that its constructor does not name.
    """
    for name in given:
        if name in known:
            continue
        own = list_options(owner)
        near = get_close_matches(name, [*dict.fromkeys([*own, *known])])
        hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(own)}"
        raise ArgumentTypeError(f"{owner.__name__} has no option {name}; {hint}")


def checks_keywords(make: Constructor) -> Constructor:
    """Return a constructor that refuses unknown options as `refuse_unknown` does.

    If it takes `**kwargs`, it refuses only those that are spelt like a required argument that is missing.
    """
    known, parts = frozenset(_list_names(make)), list(inspect.signature(make).parameters.values())[1:]
    takes_more = any(part.kind is part.VAR_KEYWORD for part in parts)

    @wraps(make)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        if not known.issuperset(kwargs):
            if not takes_more:
                refuse_unknown(type(self), kwargs, known)
            missing = [part.name for part in parts[len(args) :] if part.kind is part.POSITIONAL_OR_KEYWORD
                       and part.default is part.empty and part.name not in kwargs]  # fmt: skip
            for name in kwargs.keys() - known:
                if near := get_close_matches(name, missing):
                    raise ArgumentTypeError(f"{type(self).__name__} has no option {name}; did you mean "
                                            f"{' or '.join(near)}?")  # fmt: skip
        make(self, *args, **kwargs)

    return cast(Constructor, checked)


def list_options(owner: type) -> list[str]:
    """List the options of a constructor, and of those that it passes `**kwargs` on to."""
    names: dict[str, None] = {}
    for base in owner.__mro__:
        make: Any = vars(base).get("__init__")
        if make is None:
            continue
        own = _list_names(make)
        names |= dict.fromkeys(own)
        # A loader with a `seed` names all of its options: its `**kwargs` go to torch.
        is_handed_on = any(part.kind is part.VAR_KEYWORD for part in inspect.signature(make).parameters.values())
        if not is_handed_on or "seed" in own:
            break
    return list(names)


def _list_names(make: Callable[..., Any]) -> list[str]:
    parts = list(inspect.signature(make).parameters.values())[1:]
    return [part.name for part in parts if part.kind in (part.POSITIONAL_OR_KEYWORD, part.KEYWORD_ONLY)]
