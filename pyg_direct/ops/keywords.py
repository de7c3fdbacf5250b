"""Options by name: what a class takes, and which of them was meant by one that it does not."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar, cast

from pyg_direct.errors import ArgumentTypeError

Constructor = TypeVar("Constructor", bound=Callable[..., None])


def refuse_unknown(owner: type, given: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse options of a class that it does not know, and tell the nearest that it does.

    Args:
        owner: The class that is made.
        given: Options that its constructor does not name.
        known: Those of them that something else takes.

    Raises:
        ArgumentTypeError: there is another.
    """
    for name in given:
        if name in known:
            continue
        own = list_options(owner)
        near = get_close_matches(name, [*dict.fromkeys([*own, *known])])
        hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(own)}"
        raise ArgumentTypeError(f"{owner.__name__} has no option {name}; {hint}")


def checks_keywords(make: Constructor) -> Constructor:
    """A constructor without `**kwargs` that refuses unknown options as `refuse_unknown` does."""
    known = frozenset(_list_names(make))

    @wraps(make)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        if not known.issuperset(kwargs):
            refuse_unknown(type(self), kwargs, known)
        make(self, *args, **kwargs)

    return cast(Constructor, checked)


def list_options(owner: type) -> list[str]:
    """What the constructor of a class names, and those that it hands `**kwargs` on to."""
    names: dict[str, None] = {}
    for base in owner.__mro__:
        make: Any = vars(base).get("__init__")
        if make is None:
            continue
        own = _list_names(make)
        names |= dict.fromkeys(own)
        # A loader that has a seed names all that it has: its `**kwargs` are those of torch's.
        is_handed_on = any(part.kind is part.VAR_KEYWORD for part in inspect.signature(make).parameters.values())
        if not is_handed_on or "seed" in own:
            break
    return list(names)


def _list_names(make: Callable[..., Any]) -> list[str]:
    parts = list(inspect.signature(make).parameters.values())[1:]
    return [part.name for part in parts if part.kind in (part.POSITIONAL_OR_KEYWORD, part.KEYWORD_ONLY)]
