"""Reports of long steps on stderr: a bar if their length is known, otherwise the seconds so far.

If stderr is no terminal, but a file that keeps its output, reports are whole lines. There is at most one line a minute,
and one when a reported step ends. A step of less than two seconds prints nothing, starts nothing and imports nothing.
`announce` logs a line once.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

# Seconds before the first report.
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
# Time of the last line in a file about each step.
_TOLD: dict[str, float] = {}


class Bar:
    """A bar for `total` units of work, which appears after two seconds; use it as a context.

    Args:
        what: Name of the work, such as `placing features`.
        is_shown: False shows nothing.
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
    """Replacement of a bar in a file: a line at once, one a minute, and one at the end."""

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
        # stderr is missing or closed.
        return False


def _write_line(text: str) -> None:
    # Work goes on if stderr cannot be written.
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stderr.write(f"pyg_direct: {text}\n")
        sys.stderr.flush()


@contextlib.contextmanager
def show_wait(what: str, detail: str = "", *, items: int = FEW_ITEMS) -> Iterator[None]:
    """Report a step that runs longer than two seconds, from a thread; a step inside another one reports nothing.

    Args:
        what: Name of the step. If a step begins again within two seconds, it counts as the same step, so that many
            short steps are reported too.
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
        # If no thread can start, as while Python ends, work still goes on.
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
    """Announce a step that blocks all Python threads, so that no thread could report its progress.

    Args:
        items: Numbers that it goes through; a step over few of them is not reported.
    """
    if items >= FEW_ITEMS:
        _write_line(f"{what}: nothing is told until it is done")


def _tell(what: str, detail: str, begin: float, done: threading.Event, told: list[str]) -> None:
    """Report a step until it is `done`; add the text of each line to `told`."""
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
        # A wheel build compiles kernels without tqdm installed.
        return
    with tqdm(total=0, desc=text, bar_format="{desc}: {elapsed}", leave=False) as bar:
        bar.start_t -= time.monotonic() - begin
        while True:
            bar.refresh()
            if done.wait(_REFRESH):
                return


def announce(line: str) -> None:
    """Log a line at level INFO of the logger `pyg_direct.notice`, once; unless logging is configured it appears on
    stderr. Other log records of the package then stay hidden.
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
    """Handler that shows lines if no other handler does."""


def _has_handlers(logger: logging.Logger) -> bool:
    """Report whether the program has its own handlers."""
    return not all(isinstance(handler, (logging.NullHandler, _Shown)) for handler in logger.handlers)
