"""Letters: bytes that one process hands to others of its host and user, over a socket that nobody else reaches."""

from __future__ import annotations

import os
import socket
import stat
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pyg_direct.errors import PygDirectError

# Number of who asks, and of bytes that follow.
_NUMBER = struct.Struct("<q")
# Seconds that who hands out waits for who comes, and the other way round: they come at once, or not at all.
_SECONDS = 60.0


class Desk:
    """Where letters are fetched: a socket in a folder that only this user can enter.

    Attributes:
        path: Its name, for `fetch_letter`; it is no secret.
    """

    def __init__(self, door: socket.socket, path: str) -> None:
        self._door, self.path = door, path

    def hand_out(self, letters: Mapping[int, bytes]) -> None:
        """Give each who comes its letter, once, until all have theirs.

        Raises:
            OSError: somebody does not come in time, or hangs up.
        """
        self._door.settimeout(_SECONDS)
        left = dict(letters)
        while left:
            visitor, _ = self._door.accept()
            with visitor:
                visitor.settimeout(_SECONDS)
                (number,) = _NUMBER.unpack(_read(visitor, _NUMBER.size))
                letter = left.pop(number)
                visitor.sendall(_NUMBER.pack(len(letter)) + letter)


@contextmanager
def open_desk() -> Iterator[Desk]:
    """A desk that is there inside."""
    # Made for its owner alone.
    with tempfile.TemporaryDirectory(prefix="pyg_direct") as folder, socket.socket(socket.AF_UNIX) as door:
        path = str(Path(folder) / "desk")
        door.bind(path)
        door.listen(socket.SOMAXCONN)
        yield Desk(door, path)


def fetch_letter(path: str, number: int) -> bytes:
    """The letter of a number from the desk of a process of this host and user.

    Raises:
        PygDirectError: others could have put a desk there.
        OSError: nobody is there, or hangs up.
    """
    folder = os.stat(os.path.dirname(path))
    if folder.st_uid != os.getuid() or stat.S_IMODE(folder.st_mode) & (stat.S_IRWXG | stat.S_IRWXO):
        raise PygDirectError(f"letters must lie in a folder that only this user can enter, got {path!r}")
    with socket.socket(socket.AF_UNIX) as desk:
        desk.settimeout(_SECONDS)
        desk.connect(path)
        desk.sendall(_NUMBER.pack(number))
        (size,) = _NUMBER.unpack(_read(desk, _NUMBER.size))
        return _read(desk, size)


def _read(connection: socket.socket, size: int) -> bytes:
    pieces = bytearray()
    while len(pieces) < size:
        piece = connection.recv(size - len(pieces))
        if not piece:
            raise ConnectionResetError("the other end of a letter is gone")
        pieces += piece
    return bytes(pieces)
