"""Several processes on one machine, in a group over gloo."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import random
import socket
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Processes are forked from one that has imported it all, but never started CUDA, nor a thread.
PRELOADED = ["pyg_direct.distributed", "pyg_direct", "tests.fuzz.producers", "tests.forked"]


def start_method() -> str:
    """How processes are started: CUDA does not survive a fork, whoever started it."""
    if torch.cuda.is_available():
        return "spawn"
    multiprocessing.set_forkserver_preload(PRELOADED)
    return "forkserver"


@contextlib.contextmanager
def quick_starts() -> Iterator[None]:
    """Processes that are to be spawned are forked from one that has imported it all: what they are sent is the same."""
    real = multiprocessing.get_context
    multiprocessing.set_forkserver_preload(PRELOADED)

    def get_context(method: str | None = None) -> Any:
        return real("forkserver" if method == "spawn" else method)

    with pytest.MonkeyPatch.context() as patch:
        for module in (multiprocessing, mp):
            patch.setattr(module, "get_context", get_context)
        yield


def free_port() -> int:
    """A port of the loopback that nothing listens at, below those that systems give out: nothing gets it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(15_000, 30_000)
        with contextlib.suppress(OSError), socket.socket() as found:
            found.bind(("127.0.0.1", port))
            return port


def run_ranks(fn: Callable[..., Any], count: int, *args: Any) -> list[Any]:
    """What `fn(rank, *args)` returns in each of `count` processes of one group, by rank.

    An error in one of them ends the others and is raised here with its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        own = (fn, count, folder, args, dict(os.environ))
        mp.start_processes(_run, args=own, nprocs=count, start_method=start_method())
        return [torch.load(f"{folder}/{rank}", weights_only=False) for rank in range(count)]


def _run(rank: int, fn: Callable[..., Any], count: int, folder: str, args: tuple[Any, ...], environment: Any) -> None:
    os.environ.update(environment, GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=count)
    torch.save(fn(rank, *args), f"{folder}/{rank}")
    # Models of DDP refer to themselves: one that goes after its group may wait for ever for gloo's thread.
    gc.collect()
    # Not after an error: the others would fail at the closed connection, and might be heard first.
    dist.destroy_process_group()
