"""Gloo on one host: the loopback, and connections that are given up when a peer is gone.

`find_loopback` and `stay_on_host` serve processes that need to reach only each other. `Connections` are the sockets
of a process group.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch.distributed as dist

from pyg_direct.runtime.comm.host_group import identify_host

# Which interface Gloo and NCCL listen on; without it, that of the host's name.
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_ADDRESS = "127.0.0.1"


def find_loopback() -> str | None:
    """Name of the interface that has 127.0.0.1; None where there is none, or no way to tell networks apart."""
    if sys.platform != "linux":
        return None
    found = psutil.net_if_addrs().items()
    return next((name for name, parts in found if any(part.address == _ADDRESS for part in parts)), None)


def stay_on_host() -> None:
    """Have Gloo and NCCL of this process, and of those it starts, listen on the loopback, unless they are told where.

    For processes that are started for one host only, before their first group.
    """
    loopback = find_loopback()
    for name in (GLOO, NCCL) if loopback is not None else ():
        assert loopback is not None
        os.environ.setdefault(name, loopback)


def describe_network() -> str:
    """Equal words of processes whose groups can listen on the loopback, a word of its own of each that cannot.

    They cannot where they see different ones, or `GLOO_SOCKET_IFNAME` says otherwise.
    """
    loopback = None if os.environ.get(GLOO) else find_loopback()
    return f"{loopback} {_identify_network()}" if loopback is not None else f"rank {dist.get_rank()}"


@contextmanager
def on_loopback(is_wanted: bool) -> Iterator[None]:
    """Have groups of Gloo that are made inside listen on the loopback.

    Args:
        is_wanted: Whether to: all their processes have the same `describe_network`.
    """
    loopback = find_loopback() if is_wanted else None
    if loopback is None or os.environ.get(GLOO):
        yield
        return
    os.environ[GLOO] = loopback
    try:
        yield
    finally:
        del os.environ[GLOO]


def _identify_network() -> str:
    """A word that the processes that see the same loopback have in common."""
    space = Path("/proc/self/ns/net")
    return f"{identify_host()} {os.readlink(space) if space.is_symlink() else ''}"


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
