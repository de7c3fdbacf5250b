"""Several processes on one machine, in a group over gloo."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import random
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

T = TypeVar("T")
# How often ranks are started that lose connections while they form their group.
_ATTEMPTS = 4
# Messages of Gloo about lost peers: while it connects, and afterwards.
LOST = ("connectFullMesh", "onnection closed by peer", "onnection reset by peer")
# Processes are forked from one that has imported it all, but never started CUDA, nor a thread.
PRELOADED = ["pyg_direct.distributed.dist_neighbor_sampler", "pyg_direct.distributed.dist_loader", "pyg_direct",
             "tests.fuzz.producers", "tests.forked"]  # fmt: skip


def start_method() -> str:
    """How processes are started: CUDA does not survive a fork, whoever started it."""
    if torch.cuda.is_available():
        return "spawn"
    multiprocessing.set_forkserver_preload(PRELOADED)
    return "forkserver"


@contextlib.contextmanager
def quick_starts() -> Iterator[None]:
    """Fork processes that would be spawned from one that has imported everything; they are sent the same objects."""
    real = multiprocessing.get_context
    multiprocessing.set_forkserver_preload(PRELOADED)

    def get_context(method: str | None = None) -> Any:
        return real("forkserver" if method == "spawn" else method)

    with pytest.MonkeyPatch.context() as patch:
        for module in (multiprocessing, mp):
            patch.setattr(module, "get_context", get_context)
        yield


def free_port() -> int:
    """Return a port of the loopback without a listener, below the ports that systems assign, so that no other process
    gets it.
    """
    while True:
        port = random.SystemRandom().randrange(15_000, 30_000)
        with contextlib.suppress(OSError), socket.socket() as found:
            found.bind(("127.0.0.1", port))
            return port


class LostError(RuntimeError):
    """Ranks could not be joined: Gloo lost a connection, as it does on a busy machine."""


def join_group(rank: int, count: int, address: str, **options: Any) -> None:
    """Join the default group, of which all ranks are members when this returns.

    Raises:
        LostError: they could not be joined; the starter of the ranks starts again, with `begin_until_joined`.
    """
    try:
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=count, **options)
        # One may have all its connections while another has lost one.
        dist.barrier()
    except RuntimeError as error:
        if any(words in str(error) for words in LOST):
            raise LostError(str(error)) from error
        raise


def begin_until_joined(start: Callable[[], T]) -> T:
    """Return the result of `start()`, which starts ranks; start again if its error is, or contains, a `LostError`.

    Each time the ranks must meet at another port or file.
    """
    for attempt in range(_ATTEMPTS):
        try:
            return start()
        except Exception as error:
            # Errors of other processes come as text.
            is_lost = isinstance(error, LostError) or f"{__name__}.{LostError.__name__}: " in str(error)
            if not is_lost or attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError


def run_ranks(fn: Callable[..., Any], count: int, *args: Any) -> list[Any]:
    """Return the results of `fn(rank, *args)` in each of `count` processes of one group, by rank.

    An error in one of them ends the others and is raised here with its traceback.
    """

    def start() -> list[Any]:
        with tempfile.TemporaryDirectory() as folder:
            own = (fn, count, folder, args, dict(os.environ))
            mp.start_processes(_run, args=own, nprocs=count, start_method=start_method())
            return [torch.load(f"{folder}/{rank}", weights_only=False) for rank in range(count)]

    return begin_until_joined(start)


@contextlib.contextmanager
def ranks_started(fn: Callable[..., Any], count: int, *args: Any, store: str = "file") -> Iterator[Any]:
    """Yield the torch context of `count` processes of one group that run `fn(rank, *args)`; remaining ones are killed.

    Args:
        fn: The work after all are joined.
        count: Their number.
        args: Given to `fn`.
        store: Kind of the store, `file` or `tcp`.
    """
    with tempfile.TemporaryDirectory() as parent:

        def start() -> Any:
            folder = Path(tempfile.mkdtemp(dir=parent))
            address = f"tcp://127.0.0.1:{free_port()}" if store == "tcp" else f"file://{folder}/group"
            own = (fn, count, folder, address, args, dict(os.environ))
            context = mp.start_processes(_enter, args=own, nprocs=count, join=False, start_method=start_method())

            def are_joined() -> bool:
                return all((folder / f"joined-{rank}").exists() for rank in range(count))

            try:
                while not are_joined():
                    # No process works before all are joined: an ended one has failed.
                    if wait(context.sentinels, 0.02) and not are_joined():
                        context.join()
            except BaseException:
                kill_ranks(context)
                raise
            return context

        context = begin_until_joined(start)
        try:
            yield context
        finally:
            kill_ranks(context)


def wait_for_end(context: Any, *ranks: int) -> None:
    """Wait until these of the processes have ended, for as long as the test may take.

    An error of any of them ends the others, and is raised with its traceback; one that was killed has none.
    """
    processes = context.processes
    while any(processes[rank].exitcode is None for rank in ranks):
        # Looked at once: one that ends meanwhile is still waited for, and found next time.
        alive = [rank for rank, process in enumerate(processes) if process.exitcode is None]
        failed = next((rank for rank in range(len(processes)) if rank not in alive and processes[rank].exitcode > 0),
                      None)  # fmt: skip
        if failed is not None:
            context.sentinels = {processes[failed].sentinel: failed}
            context.join()
        wait([processes[rank].sentinel for rank in alive])


def wait_for(path: Path, context: Any = None) -> None:
    """Wait until a file is there, for as long as whoever is to write it lives.

    Args:
        path: Of the file.
        context: Of processes that are to write it, whose errors are raised; None for the parent of this one.
    """
    while not path.exists():
        if context is not None:
            assert not context.join(timeout=0.02) or path.exists(), f"{path.name} does not come"
            continue
        parent = multiprocessing.parent_process()
        assert parent is not None
        assert parent.is_alive(), f"{path.name} does not come"
        time.sleep(0.02)


def kill_ranks(context: Any) -> None:
    """End all processes of a torch context."""
    for process in context.processes:
        process.kill()
        process.join()


def _enter(rank: int, fn: Callable[..., Any], count: int, folder: Path, address: str, args: tuple[Any, ...],
           environment: Any) -> None:  # fmt: skip
    _prepare(environment)
    join_group(rank, count, address)
    (folder / f"joined-{rank}").touch()
    # No process fails in `fn` before all have reported.
    dist.barrier()
    fn(rank, *args)


def _run(rank: int, fn: Callable[..., Any], count: int, folder: str, args: tuple[Any, ...], environment: Any) -> None:
    _prepare(environment)
    join_group(rank, count, f"file://{folder}/group")
    torch.save(fn(rank, *args), f"{folder}/{rank}")
    # Models of DDP refer to themselves: one that goes after its group may wait for ever for gloo's thread.
    gc.collect()
    # Not after an error: the others would fail at the closed connection, and might be heard first.
    dist.destroy_process_group()


def _prepare(environment: Any) -> None:
    os.environ.update(environment, GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
