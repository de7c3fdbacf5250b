"""Questions to a process of the same host: arrays lie in memory that both see, a socket carries words and wakes.

Nothing that comes is unpickled. The socket has a name only while the two meet, in a folder of this user's alone.
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
from pyg_direct.runtime.comm.host_group import identify_host
from pyg_direct.runtime.host.shared_memory import SharedMemory
from pyg_direct.runtime.host.tensor_views import align

# Bytes of the words, and those of the memory that the sender's arrays lie in.
_HEADER = struct.Struct("<QQ")
# Seconds that who called waits for who came.
_SECONDS = 10.0
# Seconds until a server that did not come is called again, which may have been started anew on this host.
_REST = 10.0


class Channel:
    """One of two ends, which ask and answer in turn.

    Values are of numbers, strings, None, lists, tuples, dicts and arrays of numbers; tuples stay tuples. Arrays that
    were received are views of the sender's memory: they are valid until the next message is sent.

    Args:
        connection: A connected socket of the family `AF_UNIX`; closed with this object, or by `close()`.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        # Lets the other end know that this one is gone, and whoever waits for a message here.
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
        """The next value.

        Args:
            timeout: Seconds to wait for each piece of it; None for ever.

        Raises:
            TimeoutError: nothing came in time.
            OSError: the other end is gone.
        """
        self._socket.settimeout(timeout)
        header, descriptors, *_ = socket.recv_fds(self._socket, _HEADER.size, 1)
        num_words, num_bytes = _HEADER.unpack(header + self._read(_HEADER.size - len(header)))
        if descriptors:
            self._theirs = SharedMemory(num_bytes, descriptors[0])
        return decode(json.loads(self._read(num_words)), self._theirs.bytes.numpy())

    def _read(self, size: int) -> bytes:
        pieces = bytearray()
        while len(pieces) < size:
            piece = self._socket.recv(size - len(pieces))
            if not piece:
                raise ConnectionResetError("the other end of a channel is gone")
            pieces += piece
        return bytes(pieces)


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def call_over(ask: Callable[[str, str], bool]) -> Channel | None:
    """A channel to a process that can be told two words, if it is on this host.

    Args:
        ask: Has the other process call `go_over` with these words; whether it came.
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
    """A channel to the process that said these words; None where it is on another host, or out of sight."""
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
    """A thread's channels to servers, as far as they are on this host.

    Args:
        meet: Has the server of a part call `go_over` with two words; whether it came.
        timeout: Seconds that an answer is waited for.
    """

    def __init__(self, meet: Callable[[int, str, str], bool], timeout: float) -> None:
        self._meet, self._timeout = meet, timeout
        # None for servers of other hosts, and until when these are let be.
        self._channels: dict[int, Channel | None] = {}
        self._rests: dict[int, float] = {}
        # Parts that were told something and not heard yet.
        self._unheard: set[int] = set()

    def tell(self, method: str, questions: Mapping[int, tuple[Any, ...]]) -> list[int]:
        """Put questions to the servers of these parts; returns those who have theirs.

        Answers to questions before that were not heard, after an error or an interrupt, are never given.
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
        """(whether the server of a part has an answer, it); none where it failed or is gone.

        Raises:
            RankError: nothing came in time.
        """
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
            # Only after it has answered, which takes as long as it takes to start it anew.
            self._rests[part] = time.monotonic() + _REST
        return channel

    def _drop(self, part: int) -> None:
        """Meet the server anew before the next question: it may come back on another host."""
        self._unheard.discard(part)
        self._rests.pop(part, None)
        channel = self._channels.pop(part)
        assert channel is not None
        channel.close()


def lay_out(arrays: list[np.ndarray]) -> tuple[list[int], int]:
    """Where each array begins, and the bytes of all."""
    places, at = [], 0
    for array in arrays:
        places.append(at)
        at += align(array.nbytes)
    return places, at


def encode(value: Any, arrays: list[np.ndarray]) -> Any:
    """What JSON can tell, and the arrays apart, which are appended; each kind of container is a list that begins with
    its name.
    """
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
    """Refuse what would be read as objects, or told as such."""
    if dtype.kind not in "biufc":
        raise ValueError(f"arrays of a message must hold numbers, got {dtype}")
    return dtype


def decode(value: Any, memory: np.ndarray) -> Any:
    """The value of what `encode` made, with arrays as `lay_out` has them in uint8 `[n]`."""
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
