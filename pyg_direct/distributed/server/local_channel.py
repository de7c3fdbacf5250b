"""Messages between two processes of one host: arrays lie in shared memory, a socket carries the remaining data.

Received data is never unpickled. The socket has a name only during the rendezvous, in a folder that only this user can
access.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import struct
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pyg_direct.errors import RankError
from pyg_direct.runtime.comm.host_group import identify_host, read_whole
from pyg_direct.runtime.host.shared_memory import SharedMemory
from pyg_direct.runtime.host.tensor_views import align

# Bytes of the JSON text, and of the memory with the sender's arrays.
_HEADER = struct.Struct("<QQ")
# Seconds that the caller waits for the other process after it has connected.
_SECONDS = 10.0
# Seconds until a server that did not connect is called again; it may have restarted on this host.
_REST = 10.0


class Channel:
    """One of two ends of a channel, which ask and answer in turn.

    Values consist of numbers, strings, None, lists, tuples, dicts and arrays of numbers; tuples stay tuples. Received
    arrays are views of the sender's memory, valid until the next message is sent.

    Args:
        connection: A connected socket of the family `AF_UNIX`; closed with this object, or by `close()`.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        # Notifies the other end, and any thread that waits here.
        self.close = weakref.finalize(self, _hang_up, connection)
        self._mine, self._theirs = SharedMemory(0), SharedMemory(0)

    def send(self, value: Any) -> None:
        """Send a value.

        Raises:
            OSError: the other end is gone.
        """
        arrays: list[np.ndarray] = []
        words = json.dumps(encode(value, arrays)).encode()
        places, size = lay_out(arrays)
        is_new = size > self._mine.num_bytes
        if is_new:
            self._mine = SharedMemory(size + size // 2)
        memory = self._mine.bytes.numpy()
        for place, array in zip(places, arrays, strict=True):
            memory[place : place + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
        header = _HEADER.pack(len(words), self._mine.num_bytes)
        socket.send_fds(self._socket, [header], [self._mine.descriptor] if is_new else [])
        self._socket.sendall(words)

    def receive(self, timeout: float | None = None) -> Any:
        """Receive the next value.

        Args:
            timeout: Seconds to wait for each piece of it; None for no limit.

        Raises:
            TimeoutError: nothing arrived in time.
            OSError: the other end is gone.
        """
        self._socket.settimeout(timeout)
        header, descriptors, *_ = socket.recv_fds(self._socket, _HEADER.size, 1)
        num_words, num_bytes = _HEADER.unpack(header + read_whole(self._socket, _HEADER.size - len(header)))
        if descriptors:
            self._theirs = SharedMemory(num_bytes, descriptors[0])
        return decode(json.loads(read_whole(self._socket, num_words)), self._theirs.bytes.numpy())


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def call_over(ask: Callable[[str, str], bool]) -> Channel | None:
    """Open a channel to a process that can receive two strings; None if it is on another host.

    Args:
        ask: Makes the other process call `go_over` with these strings; returns True if it connected.
    """
    if not hasattr(socket, "send_fds"):
        return None
    with (
        contextlib.suppress(OSError),
        tempfile.TemporaryDirectory(prefix="pyg_direct") as folder,
        socket.socket(socket.AF_UNIX) as door,
    ):
        path = str(Path(folder) / "door")
        door.bind(path)
        door.listen(1)
        if ask(identify_host(), path):
            door.settimeout(_SECONDS)
            return Channel(door.accept()[0])
    return None


def go_over(host: str, path: str) -> Channel | None:
    """Open a channel to the process that sent these strings; None if it is on another host or not visible."""
    if host != identify_host() or not os.path.exists(path):
        return None
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        return None
    return Channel(connection)


class Channels(threading.local):
    """Channels of a thread to servers on this host.

    Args:
        meet: Makes the server of a part call `go_over` with two strings; returns True if it connected.
        timeout: Seconds to wait for an answer.
    """

    def __init__(self, meet: Callable[[int, str, str], bool], timeout: float) -> None:
        self._meet, self._timeout = meet, timeout
        # None for servers on other hosts, and the times until which these are not tried again.
        self._channels: dict[int, Channel | None] = {}
        self._rests: dict[int, float] = {}
        # Parts with a question whose answer was not received yet.
        self._unheard: set[int] = set()

    def tell(self, method: str, questions: Mapping[int, tuple[Any, ...]]) -> list[int]:
        """Send questions to the servers of these parts; return the parts whose server has the question.

        Earlier answers that were not received, after an error or an interrupt, are never returned.
        """
        for part in list(self._unheard):
            self._drop(part)
        told = []
        for part, question in questions.items():
            channel = self._find(part)
            if channel is None:
                continue
            self._unheard.add(part)
            try:
                channel.send((method, question))
                told.append(part)
            except OSError:
                self._drop(part)
        return told

    def hear(self, part: int) -> tuple[bool, Any]:
        """Receive (True if the server of a part has an answer, the answer); False if it failed or is gone."""
        channel = self._channels[part]
        assert channel is not None, "it was told something"
        try:
            has_answer, answer = channel.receive(self._timeout)
            self._unheard.discard(part)
            return has_answer, answer
        except TimeoutError as error:
            self._drop(part)
            raise RankError(f"the server of part {part} did not answer in {self._timeout:g} seconds") from error
        except OSError:
            self._drop(part)
            return False, None

    def _find(self, part: int) -> Channel | None:
        channel = self._channels.get(part)
        if channel is None and time.monotonic() >= self._rests.get(part, 0.0):
            channel = self._channels[part] = call_over(partial(self._meet, part))
            # After its first answer, which may include a restart.
            self._rests[part] = time.monotonic() + _REST
        return channel

    def _drop(self, part: int) -> None:
        """Reconnect before the next question: the server may come back on another host."""
        self._unheard.discard(part)
        self._rests.pop(part, None)
        channel = self._channels.pop(part)
        assert channel is not None
        channel.close()


def lay_out(arrays: list[np.ndarray]) -> tuple[list[int], int]:
    """Return the offset of each array, and the bytes of all."""
    places, at = [], 0
    for array in arrays:
        places.append(at)
        at += align(array.nbytes)
    return places, at


def encode(value: Any, arrays: list[np.ndarray]) -> Any:
    """Encode a value for JSON; arrays are appended to `arrays`. Containers become lists that begin with their name."""
    if isinstance(value, np.ndarray):
        _check_numbers(value.dtype)
        arrays.append(value)
        return ["array", value.dtype.str, list(value.shape)]
    if isinstance(value, tuple):
        return ["tuple", *(encode(item, arrays) for item in value)]
    if isinstance(value, list):
        return ["list", *(encode(item, arrays) for item in value)]
    if isinstance(value, dict):
        return ["dict", *([encode(key, arrays), encode(item, arrays)] for key, item in value.items())]
    return value


def _check_numbers(dtype: np.dtype) -> np.dtype:
    """Refuse dtypes that would be read or sent as objects."""
    if dtype.kind not in "biufc":
        raise ValueError(f"arrays of a message must hold numbers, got {dtype}")
    return dtype


def decode(value: Any, memory: np.ndarray) -> Any:
    """Decode the result of `encode`, with arrays laid out by `lay_out` in uint8 `[n]`."""
    at = 0

    def build(value: Any) -> Any:
        nonlocal at
        if not isinstance(value, list):
            return value
        kind, *items = value
        if kind == "array":
            dtype, shape = _check_numbers(np.dtype(items[0])), tuple(items[1])
            begin, size = at, math.prod(shape) * dtype.itemsize
            at += align(size)
            if min(shape, default=0) < 0 or begin + size > memory.size:
                raise ValueError(f"an array of a message lies outside of its {memory.size} bytes: {dtype} {shape}")
            return memory[begin : begin + size].view(dtype).reshape(shape)
        if kind == "dict":
            return {build(key): build(item) for key, item in items}
        return tuple(map(build, items)) if kind == "tuple" else [build(item) for item in items]

    return build(value)
