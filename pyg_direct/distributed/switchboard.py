"""`Switchboard`: the lines of a server to the clients of other hosts."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from pyg_direct.distributed.line import (
    LARGE,
    MEETING,
    SERVER,
    Line,
    Offer,
    Sent,
    can_open,
    count_bytes,
    find_patience,
    open_store,
)

# Lines at most, as clients that are gone say nothing, and seconds after which one that was not used may go.
_MOST, _IDLE, _LEAST_IDLE = 64, 600.0, 60.0


class Switchboard:
    """Opens lines, lets large answers go over them, and drops those that nobody uses.

    Its methods are called by one thread at a time.

    Args:
        find_address: The address of this host that others reach; None where there are to be no lines.
    """

    def __init__(self, find_address: Callable[[], str] | None) -> None:
        self._find_address = find_address
        self._store: Any = None
        self._lines: dict[str, Line] = {}
        # Until when bytes on their way are waited for, and when a line was used last.
        self._due: dict[str, float] = {}
        self._used: dict[str, float] = {}
        self._opening: dict[str, threading.Thread] = {}

    def offer(self) -> Offer | None:
        """Where a client can meet this server, beside all others, in the next seconds; None for no lines, or enough."""
        self._sweep()
        if self._find_address is None or not can_open() or len(self._used) >= _MOST:
            return None
        address = self._find_address()
        try:
            self._store = self._store or open_store(address)
        except (OSError, RuntimeError):
            # Others know this host by an address that is not its own.
            return None
        offer = Offer(address, self._store.port, uuid.uuid4().hex)
        self._used[offer.name] = time.monotonic()
        self._opening[offer.name] = thread = threading.Thread(target=self._meet, args=(offer,), daemon=True,
                                                              name="pyg_direct_line")  # fmt: skip
        thread.start()
        return offer

    def _meet(self, offer: Offer) -> None:
        try:
            self._lines[offer.name] = Line(offer, SERVER, offer.address)
        except OSError:
            self._used.pop(offer.name, None)
        finally:
            del self._opening[offer.name]

    def put_through(self, name: str, answer: Any) -> tuple[bool, Sent | None, Any]:
        """(whether there is this line, what was sent over it, else the answer)."""
        thread = self._opening.get(name)
        if thread is not None:
            # The client was there a little sooner.
            thread.join(MEETING)
        now = time.monotonic()
        line = self._lines.get(name)
        if line is not None:
            self._used[name] = now
        self._sweep()
        size = count_bytes(answer)
        if line is None or size < LARGE:
            return line is not None, None, answer
        try:
            sent = line.send(answer)
        except OSError:
            self._drop(name)
            return False, None, answer
        self._due[name] = now + 2 * find_patience(size)
        return True, sent, None

    def _sweep(self) -> None:
        """Let go of answers that were taken long ago, and drop lines that were not used as long."""
        now = time.monotonic()
        limit = _IDLE if len(self._used) < _MOST else _LEAST_IDLE
        for name in [name for name, due in self._due.items() if due < now]:
            del self._due[name]
            try:
                self._lines[name].settle()
            except OSError:
                self._drop(name)
        for name in [name for name in list(self._lines) if now - self._used[name] > limit]:
            self._drop(name)

    def _drop(self, name: str) -> None:
        for kept in (self._lines, self._due, self._used):
            kept.pop(name, None)

    def close(self) -> None:
        """Wait for threads that meet clients, which Python must not end within."""
        for thread in list(self._opening.values()):
            thread.join(MEETING)
        self._lines.clear()
