"""The loopback for processes that only each other must reach: those of one host."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch.distributed as dist

from pyg_direct.runtime.group import identify_host

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
