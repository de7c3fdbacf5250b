"""Steps that take long say so on stderr: with a bar where their length is known, with the seconds so far where not.

What is over within two seconds says nothing, starts nothing and imports nothing.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

# Seconds before anything is said.
PATIENCE = 2.0
# Numbers that any step is through with before.
FEW_ITEMS = 1 << 22
# Seconds between two lines, at a terminal and elsewhere.
_REFRESH = (1.0, 60.0)

_WAITING = threading.local()
# When each step was begun and when it ended last, by name.
_BEGUN: dict[str, tuple[float, float]] = {}


class Bar:
    """A bar for `total` units of work, which appears after two seconds; use it as a context.

    Args:
        total: Units of all the work.
        what: What is done, such as `placing features`.
        unit: Of the work.
    """

    def __init__(self, total: int, what: str, unit: str = "") -> None:
        self._total, self._what, self._unit = total, what, unit
        self._done, self._begin = 0, time.time()
        self._bar: Any = None

    def update(self, count: int) -> None:
        """Note that `count` more units are done."""
        self._done += count
        if self._bar is not None:
            self._bar.update(count)
        elif time.time() - self._begin > PATIENCE:
            from tqdm import tqdm

            self._bar = tqdm(total=self._total, desc=self._what, unit=self._unit, unit_scale=True, mininterval=0.5)
            self._bar.start_t = self._begin
            self._bar.update(self._done)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()


@contextlib.contextmanager
def show_wait(what: str, detail: str = "", *, items: int = FEW_ITEMS) -> Iterator[None]:
    """Say after two seconds, from a thread, that a step goes on; a step inside another one says nothing.

    Args:
        what: The step. One that is taken again within two seconds is the same step, so that many short ones are told of
            as well.
        detail: What else to say.
        items: Numbers that the step goes through, if that is known: a thread is not worth it for few of them.
    """
    if items < FEW_ITEMS or getattr(_WAITING, "is_on", False):
        yield
        return
    now = time.monotonic()
    begin, end = _BEGUN.get(what, (now, now))
    begin = begin if now - end <= PATIENCE else now
    done = threading.Event()
    thread = threading.Thread(target=_tell, args=(f"{what}{detail}", begin, done), name="pyg_direct_wait", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        # Where threads cannot start any more, as while Python ends, work goes on all the same.
        yield
        return
    _WAITING.is_on = True
    try:
        yield
    finally:
        _WAITING.is_on = False
        done.set()
        thread.join()
        _BEGUN[what] = begin, time.monotonic()


def _tell(what: str, begin: float, done: threading.Event) -> None:
    if done.wait(max(0.0, begin + PATIENCE - time.monotonic())):
        return
    try:
        from tqdm import tqdm
    except ImportError:
        # Kernels are compiled for a wheel where nothing else is installed.
        return
    with tqdm(total=0, desc=what, bar_format="{desc}: {elapsed}", leave=False) as bar:
        bar.start_t -= time.monotonic() - begin
        while True:
            bar.refresh()
            if done.wait(_REFRESH[0 if sys.stderr.isatty() else 1]):
                return
