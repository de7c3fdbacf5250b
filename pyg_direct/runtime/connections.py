"""Connections of a process group over sockets, to be given up when one of their ends is gone."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager

_OPEN_FILES = "/proc/self/fd"


class Connections:
    """Sockets that a process group opened.

    Gloo waits for a host that no longer answers until its timeout, and keeps the process from ending so long; it has
    no way to give up. Where its sockets are shut down it fails at once.
    """

    def __init__(self) -> None:
        self._sockets: dict[int, int] = {}
        self._before: dict[int, int] | None = None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Note the sockets that are opened meanwhile."""
        self._before = _list_sockets()
        try:
            yield
        finally:
            self._note()
            self._before = None

    def _note(self) -> None:
        if (before := self._before) is not None:
            self._sockets |= {fd: inode for fd, inode in _list_sockets().items() if before.get(fd) != inode}

    def give_up(self) -> None:
        """Shut down those that are still open, also while some are being opened."""
        self._note()
        now = _list_sockets()
        for fd, inode in self._sockets.items():
            # The number may have gone to something else.
            if now.get(fd) == inode:
                with socket.socket(fileno=os.dup(fd)) as own:
                    try:
                        own.shutdown(socket.SHUT_RDWR)
                    except OSError:
                        continue


def _list_sockets() -> dict[int, int]:
    """Inodes of this process's connected sockets by file descriptor, on Linux."""
    found = {}
    for name in os.listdir(_OPEN_FILES) if os.path.isdir(_OPEN_FILES) else ():
        try:
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                with socket.socket(fileno=os.dup(int(name))) as own:
                    own.getpeername()
                found[int(name)] = status.st_ino
        except OSError:
            # Closed meanwhile, or one that only listens.
            continue
    return found
