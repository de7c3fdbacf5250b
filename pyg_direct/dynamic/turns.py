"""Methods of an object that threads call in turn, since they read, change and keep the same things."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from pyg_direct.runtime.mode import ordinary_tensors

T = TypeVar("T")


def take_turns(*names: str) -> Callable[[type[T]], type[T]]:
    """Let a class's methods of these names run in one thread at a time; its objects have the lock `_ahead.turn`.

    What an evaluation in `torch.inference_mode` is the first to ask for serves training too.
    """

    def change(cls: type[T]) -> type[T]:
        for name in names:
            setattr(cls, name, _in_turn(getattr(cls, name)))
        return cls

    return change


def _in_turn(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def run(self: Any, *args: Any, **options: Any) -> Any:
        with self._ahead.turn, ordinary_tensors():
            return method(self, *args, **options)

    return run
