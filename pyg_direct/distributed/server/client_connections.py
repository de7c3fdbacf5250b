"""Gloo links for large answers between hosts: `Line` on one side of a link, `Switchboard` for all links of a server.

A `Line` is a pair of torch.distributed's Gloo between a server and a thread of a client. Arrays are sent as raw bytes;
a small message announces and describes them. While lines are open, both ends listen at their given address, each on a
port that the system chooses. A `Switchboard` holds the lines of a server to clients on other hosts.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from pyg_direct.distributed.server.local_channel import decode, encode, lay_out

# Answers of at least this many bytes use a line. Ray sends up to 100 KiB within the message that would announce them.
LARGE = 96 << 10
SERVER, CLIENT = 0, 1
# Seconds for both ends to connect, and extra seconds for bytes beyond the time of the slowest network in use.
MEETING, _SILENCE = 5.0, 10.0
_BYTES_A_SECOND = 1 << 20
# Seconds until a failed connection is tried again.
_REST = 300.0


class Offer(NamedTuple):
    """Rendezvous of both ends: address and port of a store, and the name of the line."""

    address: str
    port: int
    name: str


class Sent(NamedTuple):
    """Description of an answer sent over a line: its number, its bytes, and its structure around the arrays."""

    number: int
    num_bytes: int
    words: Any


_OPEN: weakref.WeakSet[Line] = weakref.WeakSet()
_FORKED: list[Any] = []


def _hold_open() -> None:
    _FORKED[:] = [part for line in list(_OPEN) for part in (line._pair, line._work, line._held)]


def _leave_open() -> None:
    # A forked child has no thread for these objects; their destructors would wait for it, even at the child's exit.
    for part in _FORKED:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(part))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold_open, after_in_parent=_FORKED.clear, after_in_child=_leave_open)


class Line:
    """One end of a line. The other end notices at once when this end is dropped or its process ends.

    Args:
        offer: Rendezvous of both ends.
        end: `SERVER` or `CLIENT`.
        address: Address of this host to listen at.

    Raises:
        OSError: the other end did not connect in time.
    """

    def __init__(self, offer: Offer, end: int, address: str) -> None:
        self.name, self._end = offer.name, end
        limit = timedelta(seconds=MEETING)
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout, options._threads = limit, 1
        try:
            options._devices = [_listen(address)]
            store = TCPStore(offer.address, offer.port, is_master=False, wait_for_workers=False, timeout=limit)
            # Declared before the memory that it reads, so that it is dropped first.
            self._pair = gloo(PrefixStore(offer.name, store), end, 2, options)
        except RuntimeError as error:
            raise ConnectionError(str(error)) from error
        self._number = 0
        # The pending send, with the tensor that it reads in place; and a receive buffer that is reused.
        self._work: Any = None
        self._held: torch.Tensor | None = None
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        _OPEN.add(self)

    def send(self, value: Any) -> Sent:
        """Send a value, as `Channel` does, without waiting for its arrival; arrays must not change meanwhile.

        Raises:
            OSError: the other end is gone, or has not received the previous value.
        """
        self.settle()
        arrays: list[np.ndarray] = []
        words = encode(value, arrays)
        data = _join(arrays)
        self._number += 1
        self._held = torch.from_numpy(data if data.flags.writeable else data.copy())
        try:
            self._work = self._pair.send([self._held], 1 - self._end, self._number)
        except RuntimeError as error:
            raise ConnectionError(str(error)) from error
        return Sent(self._number, data.size, words)

    def settle(self) -> None:
        """Release the previous value.

        Raises:
            OSError: the other end has not received it.
        """
        if self._work is not None:
            _finish(self._work, 1.0)
            self._work = self._held = None

    def receive(self, sent: Sent, timeout: float) -> Any:
        """Receive a value; its arrays are valid until the next call.

        Args:
            sent: Result of `send`.
            timeout: Seconds to wait at most; fewer for values that cannot take as long.

        Raises:
            OSError: the other end is gone, or silent.
        """
        if self._memory.numel() < sent.num_bytes:
            self._memory = torch.empty(sent.num_bytes + sent.num_bytes // 2, dtype=torch.uint8, device="cpu")
        data = self._memory[: sent.num_bytes]
        try:
            work = self._pair.recv([data], 1 - self._end, sent.number)
        except RuntimeError as error:
            raise ConnectionError(str(error)) from error
        _finish(work, min(timeout, find_patience(sent.num_bytes)))
        return decode(sent.words, data.numpy())


class Lines(threading.local):
    """Lines of a thread to servers on other hosts; a line is opened after the first large answer.

    Args:
        meet: Returns the offer of a part's server, or None.
        find_address: Returns the address of this host that others can reach.
    """

    def __init__(self, meet: Callable[[int], Offer | None], find_address: Callable[[], str]) -> None:
        self._meet, self._find_address = meet, find_address
        self._lines: dict[int, Line] = {}
        # Parts with a question whose answer was not received yet, and the times until which no line is tried.
        self._unheard: set[int] = set()
        self._rests: dict[int, float] = {}

    def find(self, part: int) -> str | None:
        """Find the name of the line to a server before a question; None without a line.

        An earlier answer that was not received, after an error or an interrupt, is never returned.
        """
        if part in self._unheard:
            self._drop(part)
        if part not in self._lines:
            return None
        self._unheard.add(part)
        return self._lines[part].name

    def hear(self, part: int, reply: tuple[bool, Sent | None, Any], timeout: float) -> tuple[bool, Any]:
        """Receive (True if there is an answer, the answer); False if the line failed.

        Args:
            part: Part of the server.
            reply: Message of the server: (True if it has this line, description of the bytes on it or None, otherwise
                the answer).
            timeout: Seconds to wait for the bytes.
        """
        is_open, sent, answer = reply
        if is_open and sent is not None:
            try:
                answer = self._lines[part].receive(Sent(*sent), timeout)
            except OSError:
                self._drop(part)
                return False, None
        self._unheard.discard(part)
        if not is_open:
            self._drop(part)
        return True, answer

    def consider(self, part: int, answer: Any) -> None:
        """Open a line if an answer that came without one was large."""
        if part in self._lines or count_bytes(answer) < LARGE or time.monotonic() < self._rests.get(part, 0.0):
            return
        self._rests[part] = time.monotonic() + _REST
        offer = self._meet(part) if can_open() else None
        if offer is not None:
            try:
                self._lines[part] = Line(offer, CLIENT, self._find_address())
                del self._rests[part]
            except OSError:
                return

    def _drop(self, part: int) -> None:
        self._unheard.discard(part)
        self._lines.pop(part, None)


def can_open() -> bool:
    """Check if this torch has Gloo."""
    return dist.is_available() and hasattr(dist, "ProcessGroupGloo")


def find_patience(num_bytes: int) -> float:
    """Return the seconds after which `num_bytes` are no longer waited for."""
    return _SILENCE + num_bytes / _BYTES_A_SECOND


def count_bytes(answer: Any) -> int:
    """Count the bytes of the arrays of an answer."""
    arrays: list[np.ndarray] = []
    encode(answer, arrays)
    return sum(array.nbytes for array in arrays)


def open_store(address: str) -> Any:
    """Open a store for the rendezvous of lines at an address of this host, on a port that the system chooses."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # A socket of torch would listen on all interfaces.
    with socket.create_server((address, 0), family=family) as door:
        port = door.getsockname()[1]
        # Not over libuv, which accepts no socket before torch 2.7.
        return TCPStore(address, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=MEETING),
                        master_listen_fd=door.detach(), use_libuv=False)  # fmt: skip


@lru_cache
def _listen(address: str) -> Any:
    """Create the Gloo device of all lines of this process, which one thread serves."""
    return dist.ProcessGroupGloo.create_device(hostname=address)


def _finish(work: Any, seconds: float) -> None:
    try:
        work.wait(timedelta(seconds=max(seconds, 1e-3)))
    except RuntimeError as error:
        raise ConnectionError(str(error)) from error


def _join(arrays: list[np.ndarray]) -> np.ndarray:
    """Join the bytes of arrays in the layout of `lay_out`; a single array is not copied."""
    if len(arrays) == 1:
        return np.ascontiguousarray(arrays[0]).reshape(-1).view(np.uint8)
    places, size = lay_out(arrays)
    joined = np.zeros(size, np.uint8)
    for place, array in zip(places, arrays, strict=True):
        joined[place : place + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return joined


# Limit of lines, as vanished clients give no notice; and seconds after which an unused line may be dropped.
_MOST, _IDLE, _LEAST_IDLE = 64, 600.0, 60.0


class Switchboard:
    """Lines of a server: opens them, sends large answers over them, and drops unused ones.

    Its methods are called by one thread at a time.

    Args:
        find_address: Returns the address of this host that others can reach; None for no lines.
    """

    def __init__(self, find_address: Callable[[], str] | None) -> None:
        self._find_address = find_address
        self._store: Any = None
        self._lines: dict[str, Line] = {}
        # Times until which pending bytes are waited for, and times of the last use.
        self._due: dict[str, float] = {}
        self._used: dict[str, float] = {}
        self._opening: dict[str, threading.Thread] = {}

    def offer(self) -> Offer | None:
        """Offer a rendezvous to a client for the next seconds, in a background thread; None if lines are disabled or
        too many.
        """
        self._sweep()
        if self._find_address is None or not can_open() or len(self._used) >= _MOST:
            return None
        address = self._find_address()
        try:
            self._store = self._store or open_store(address)
        except (OSError, RuntimeError):
            # Other hosts know this host by an address that is not its own.
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
        """Send an answer: (True if this line exists, description of the bytes on it or None, otherwise the answer)."""
        thread = self._opening.get(name)
        if thread is not None:
            # The client was slightly earlier.
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
        """Release answers that were received long ago, and drop lines unused for as long."""
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
        """Wait for the threads that meet clients: Python must not exit while they run."""
        for thread in list(self._opening.values()):
            thread.join(MEETING)
        self._lines.clear()
