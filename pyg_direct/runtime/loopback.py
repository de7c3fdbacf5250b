"""The loopback for processes that only each other must reach: those of one host."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from pathlib import Path

import psutil
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from pyg_direct.runtime.group import identify_host

# Which interface Gloo and NCCL listen on; without it, that of the host's name.
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_ADDRESS = "127.0.0.1"
_NUMBERS = count()


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


@contextmanager
def gloo_on_loopback(ranks: Sequence[int], timeout: float) -> Iterator[None]:
    """Groups that are made inside listen on the loopback where all their processes see the same one, unless
    `GLOO_SOCKET_IFNAME` says otherwise. Called by all processes of the default group, in one order.

    Args:
        ranks: Who is in the groups, by rank in the default group.
        timeout: Seconds to wait for what the others say.
    """
    store = PrefixStore(f"pyg_direct/network/{next(_NUMBERS)}", dist.distributed_c10d._get_default_store())
    loopback = None if os.environ.get(GLOO) else find_loopback()
    # Equal words of those that can do the same, a word of its own of each that cannot.
    word = f"{loopback} {_identify_network()}" if loopback is not None else f"rank {dist.get_rank()}"
    store.set(str(dist.get_rank()), word)
    if dist.get_rank() not in ranks:
        yield
        return
    keys = [str(rank) for rank in ranks]
    store.wait(keys, timedelta(seconds=timeout))
    if loopback is None or any(store.get(key).decode() != word for key in keys):
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
