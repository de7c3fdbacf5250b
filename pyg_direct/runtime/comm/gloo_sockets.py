"""Gloo on one host: the loopback, and connections that are shut down when a peer is gone.

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

# Interface that Gloo and NCCL listen on; without it, the interface of the host's name.
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_ADDRESS = "127.0.0.1"


def find_loopback() -> str | None:
    """Return the name of the interface with 127.0.0.1; None without one, or if networks cannot be identified."""
    if sys.platform != "linux":
        return None
    found = psutil.net_if_addrs().items()
    return next((name for name, parts in found if any(part.address == _ADDRESS for part in parts)), None)


def stay_on_host() -> None:
    """Make Gloo and NCCL of this process and its children listen on the loopback, unless the environment names an
    interface.

    For processes that are started for one host only, before their first group.
    """
    loopback = find_loopback()
    for name in (GLOO, NCCL) if loopback is not None else ():
        assert loopback is not None
        os.environ.setdefault(name, loopback)


def describe_network() -> str:
    """Describe the network of this process: equal words for processes whose groups can listen on the loopback, and a
    unique word for each other process.

    They cannot if they see different loopbacks, or if `GLOO_SOCKET_IFNAME` names another interface.
    """
    loopback = None if os.environ.get(GLOO) else find_loopback()
    return f"{loopback} {_identify_network()}" if loopback is not None else f"rank {dist.get_rank()}"


@contextmanager
def on_loopback(is_wanted: bool) -> Iterator[None]:
    """Make Gloo groups that are created in the block listen on the loopback.

    Args:
        is_wanted: False leaves the default; True requires that all their processes have the same `describe_network`.
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
    """Return a word that all processes with the same loopback have in common."""
    space = Path("/proc/self/ns/net")
    return f"{identify_host()} {os.readlink(space) if space.is_symlink() else ''}"


_OPEN_FILES = "/proc/self/fd"


class Connections:
    """Sockets that a process group opened.

    If a host no longer answers, Gloo waits until its timeout, and keeps the process from ending; it has no way to give
    up. If its sockets are shut down, it fails at once.
    """

    def __init__(self) -> None:
        self._sockets: dict[int, int] = {}
        self._before: dict[int, int] | None = None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Record the sockets that are opened in the block."""
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
        """Shut down the sockets that are still open, also while others are being opened."""
        self._note()
        now = _list_sockets()
        for fd, inode in self._sockets.items():
            # The descriptor may have been reused.
            if now.get(fd) == inode:
                with socket.socket(fileno=os.dup(fd)) as own:
                    try:
                        own.shutdown(socket.SHUT_RDWR)
                    except OSError:
                        continue


def _list_sockets() -> dict[int, int]:
    """Return inodes of this process's connected sockets by file descriptor, on Linux."""
    found = {}
    for name in os.listdir(_OPEN_FILES) if os.path.isdir(_OPEN_FILES) else ():
        try:
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                with socket.socket(fileno=os.dup(int(name))) as own:
                    own.getpeername()
                found[int(name)] = status.st_ino
        except OSError:
            # Closed meanwhile, or a listening socket.
            continue
    return found
