"""Steps that take long say so on stderr: with a bar where their length is known, with the seconds so far where not.

Where stderr is no terminal, but a file that keeps what it is given, they write whole lines, one a minute at most, and
one when a step ends that they told of. What is over within two seconds says nothing, starts nothing and imports
nothing. `announce` logs a line once.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

# Seconds before anything is said.
PATIENCE = 2.0
# Numbers that any step is through with before.
FEW_ITEMS = 1 << 22
# Seconds between two looks of a terminal, and between two lines of a file.
_REFRESH, _MINUTE = 1.0, 60.0

_WAITING = threading.local()
# Lines that `announce` has logged.
_SAID: set[str] = set()
# When each step was begun and when it ended last, by name.
_BEGUN: dict[str, tuple[float, float]] = {}
# When a file was told of it last.
_TOLD: dict[str, float] = {}


class Bar:
    """A bar for `total` units of work, which appears after two seconds; use it as a context.

    Args:
        total: Units of all the work.
        what: What is done, such as `placing features`.
        unit: Of the work.
        done: Units that were done before.
        is_shown: Whether to say anything.
    """

    def __init__(self, total: int, what: str, unit: str = "", *, done: int = 0, is_shown: bool = True) -> None:
        self._total, self._what, self._unit = total, what, unit
        self._before, self._done, self._is_shown = done, done, is_shown
        self._begin = time.time()
        self._bar: Any = None

    def update(self, count: int) -> None:
        """Note that `count` more units are done."""
        self._done += count
        if self._bar is not None:
            self._bar.update(count)
        elif self._is_shown and time.time() - self._begin > PATIENCE:
            self._bar = self._open() if _is_terminal() else _Lines(self._total, self._what, self._before, self._begin)
            self._bar.update(self._done - self._before)

    def _open(self) -> Any:
        from tqdm import tqdm

        bar = tqdm(total=self._total, initial=self._before, desc=self._what, unit=self._unit, unit_scale=True,
                   mininterval=0.5)  # fmt: skip
        bar.start_t = self._begin
        return bar

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()


class _Lines:
    """What a file gets instead of a bar: a line now, one a minute, and one at the end."""

    def __init__(self, total: int, what: str, done: int, begin: float) -> None:
        self._total, self._what, self._done, self._begin = total, what, done, begin
        self._written = -_MINUTE

    def update(self, count: int) -> None:
        self._done += count
        if time.time() - self._written >= _MINUTE:
            self._write()

    def close(self) -> None:
        self._write()

    def _write(self) -> None:
        self._written = time.time()
        share = self._done / max(1, self._total)
        _write_line(f"{self._what}: {share:.0%} after {self._written - self._begin:.0f} s")


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):
        # There is none, or it is closed.
        return False


def _write_line(text: str) -> None:
    # Work goes on where nothing can be told.
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stderr.write(f"pyg_direct: {text}\n")
        sys.stderr.flush()


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
    told: list[str] = []
    thread = threading.Thread(target=_tell, args=(what, detail, begin, done, told), name="pyg_direct_wait", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        # Where threads cannot start any more, as while Python ends, work goes on all the same.
        yield
        return
    _WAITING.is_on = True
    ended = "failed"
    try:
        yield
        ended = "done"
    finally:
        _WAITING.is_on = False
        done.set()
        thread.join()
        _BEGUN[what] = begin, time.monotonic()
        if told:
            _write_line(f"{told[-1]}: {ended} after {_BEGUN[what][1] - begin:.0f} s")


def tell_ahead(what: str, *, items: int) -> None:
    """Say that a step begins which keeps all threads of Python waiting, so that none can say that it goes on.

    Args:
        what: The step.
        items: Numbers that it goes through; a step over few of them is not told of.
    """
    if items >= FEW_ITEMS:
        _write_line(f"{what}: nothing is told until it is done")


def _tell(what: str, detail: str, begin: float, done: threading.Event, told: list[str]) -> None:
    """Say that a step goes on until it is `done`; what lines call it is added to `told`."""
    if done.wait(max(0.0, begin + PATIENCE - time.monotonic())):
        return
    if _is_terminal():
        _tell_terminal(f"{what}{detail}", begin, done)
        return
    while not done.wait(max(0.0, _TOLD.get(what, -_MINUTE) + _MINUTE - time.monotonic())):
        _TOLD[what] = time.monotonic()
        told.append(f"{what}{detail}")
        _write_line(f"{told[-1]}: {_TOLD[what] - begin:.0f} s so far")


def _tell_terminal(text: str, begin: float, done: threading.Event) -> None:
    try:
        from tqdm import tqdm
    except ImportError:
        # Kernels are compiled for a wheel where nothing else is installed.
        return
    with tqdm(total=0, desc=text, bar_format="{desc}: {elapsed}", leave=False) as bar:
        bar.start_t -= time.monotonic() - begin
        while True:
            bar.refresh()
            if done.wait(_REFRESH):
                return


def announce(line: str) -> None:
    """Log a line at level INFO of the logger `pyg_direct.notice`, once; seen on stderr unless logging is set up
    otherwise. All else that the package logs is quiet then.
    """
    if line in _SAID:
        return
    _SAID.add(line)
    tree, logger = logging.getLogger("pyg_direct"), logging.getLogger("pyg_direct.notice")
    if logger.level in (logging.NOTSET, logging.INFO):
        logger.setLevel(logging.INFO if tree.level == logging.NOTSET else logging.NOTSET)
    is_heard = any(_has_handlers(one) for one in (logger, tree, logging.getLogger()))
    shown = next((handler for handler in logger.handlers if isinstance(handler, _Shown)), None)
    if is_heard and shown is not None:
        # The program has set logging up since.
        logger.removeHandler(shown)
    if not is_heard and shown is None:
        handler = _Shown()
        handler.setFormatter(logging.Formatter("pyg_direct: %(message)s"))
        logger.addHandler(handler)
    logger.info(line)


class _Shown(logging.StreamHandler):  # type: ignore[type-arg]
    """Shows lines where nobody else does."""


def _has_handlers(logger: logging.Logger) -> bool:
    """Whether somebody else listens."""
    return not all(isinstance(handler, (logging.NullHandler, _Shown)) for handler in logger.handlers)
