"""Threads of torch's own loops on a CPU, of which a loop wakes all, however few it has work for."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

# More than any machine has.
_MANY = 2**30


class few_threads:  # noqa: N801
    """Loops of torch that the calling thread runs in this block keep to so many threads, where they can be told to.

    `torch.set_num_threads` would be heard by other threads too. With GNU OpenMP a loop of 1,000 searches wakes all 64
    threads of a large host, which takes milliseconds where they sleep; and all wait for each, however long a virtual
    machine has to do without its core.

    Args:
        most: How many.
    """

    __slots__ = "before", "most"

    def __init__(self, most: int) -> None:
        self.most, self.before = most, most

    def __enter__(self) -> None:
        self.before = torch.get_num_threads()
        _set_threads(self.before, min(self.before, self.most))

    def __exit__(self, *error: object) -> None:
        _set_threads(min(self.before, self.most), self.before)


class one_thread(few_threads):  # noqa: N801
    """The same for one thread.

    Args:
        is_on: Whether; so that a caller need not ask.
    """

    __slots__ = ()

    def __init__(self, is_on: bool = True) -> None:
        super().__init__(1 if is_on else _MANY)

    @property
    def is_on(self) -> bool:
        """Whether they keep to one."""
        return self.most == 1


def _set_threads(before: int, count: int) -> None:
    if before != count and (tell := _find_setter()) is not None:
        tell(count)


@functools.cache
def _find_setter() -> Callable[[int], None] | None:
    """Sets how many threads the calling one begins loops with; None where torch's are not OpenMP's."""
    try:
        tell = ctypes.CDLL(None).omp_set_num_threads
    except (AttributeError, OSError, TypeError):
        # No such library, or none that all others see.
        return None
    tell.argtypes, tell.restype = [ctypes.c_int], None
    # There may be several copies of it, of which torch uses one.
    before = torch.get_num_threads()
    tell(before + 1)
    is_heard = torch.get_num_threads() == before + 1
    tell(before)
    return tell if is_heard else None
