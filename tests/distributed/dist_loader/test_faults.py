"""What a process of a group hears when another one fails, is killed, or never comes."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from pyg_direct import NeighborLoader
from pyg_direct.distributed.dist_loader import DistNeighborLoader
from pyg_direct.errors import PartitionError, RankError
from tests.distributed.damage import SAID, damage
from tests.distributed.ranks import as_dict, assert_in_turn, make_data, open_graph, write_data
from tests.processes import LostError, begin_until_joined, free_port, join_group, run_ranks, start_method, wait_for

# Ranks are forked from a process that has imported it all, and end as programs do.
PROGRAM = """
import os, signal, sys, time
import torch, torch.distributed as dist
from pyg_direct.distributed import DistGraph, DistNeighborLoader
from tests.processes import LostError, join_group
# All ranks find the loops of loaders ready.
import tests.forked

def run(rank, port, size, number):
    try:
        join_group(rank, size, f"tcp://127.0.0.1:{port}")
    except LostError:
        # The program with all of its processes.
        os.killpg(0, signal.SIGKILL)
    # A process that is killed is named in time by default; that of a frozen one is the silence. No test has time for
    # the limit.
    options = {"timeout": 3600, **({"silence": 3} if number == signal.SIGSTOP else {})}
    with DistGraph(f"{sys.argv[1]}/{size}", device="cpu", share_graph=False, **options) as graph:
        for batch_number, batch in enumerate(DistNeighborLoader(graph, [3, 2], batch_size=5, seed=1)):
            if rank == 1 and batch_number == 3:
                # Not before the others have the batch that was asked for ahead.
                time.sleep(1 if size == 3 else 0)
                os.kill(os.getpid(), number)
            # The last of three asks for the next one when the first has long heard of it, and is gone too.
            time.sleep(8 if rank == 2 and batch_number == 3 else 0.02)

jobs = []
for port, size, number in zip(sys.argv[2:], (2, 3), (signal.SIGKILL, signal.SIGSTOP)):
    jobs.append([])
    for rank in range(size):
        jobs[-1].append(os.fork())
        if jobs[-1][-1] == 0:
            os.dup2(os.open(f"{sys.argv[1]}/{size}-{rank}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 2)
            run(rank, port, size, number)
            sys.exit()
for pids in jobs:
    frozen, _ = os.waitpid(pids.pop(1), os.WUNTRACED)
    for pid in pids:
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
os.kill(frozen, signal.SIGKILL)
"""


def run_program(folder):
    """What it prints."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "GLOO_SOCKET_IFNAME": "lo",
                   "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}  # fmt: skip
    command = [sys.executable, "-c", PROGRAM, folder, *(str(free_port()) for _ in range(2))]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True) as done:
        try:
            said, _ = done.communicate()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(done.pid, signal.SIGKILL)
    if done.returncode == -signal.SIGKILL:
        raise LostError
    assert done.returncode == 0
    return said


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rank_that_is_killed_or_frozen_is_named_soon(tmp_path):
    for size in (2, 3):
        write_data(tmp_path / str(size), make_data(), size)

    said = begin_until_joined(lambda: run_program(tmp_path))

    assert said.split() == ["1"] * 3
    heard = [(tmp_path / name).read_text() for name in ("2-0", "3-0", "3-2")]
    assert all("RankError: rank 1 is gone" in text for text in heard), heard
    assert "no sign of life for 3 seconds" in heard[1]


def run_job(rank, folder, ports, signals):
    """Two jobs of two processes, and one process that tries the port of the first."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    job, own_rank = divmod(rank, 2)
    if rank == 4:
        wait_for(signals / "0")
        with pytest.raises(RuntimeError) as taken:
            dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{ports[0]}", rank=0, world_size=2)
        (signals / "taken").write_text(str(taken.value))
        return
    join_group(own_rank, 2, f"tcp://127.0.0.1:{ports[job]}")
    (signals / f"{rank}").touch()
    # All four load at once.
    for name in ("0", "1", "2", "3", "taken"):
        wait_for(signals / name)
    with open_graph(folder) as graph:
        found = [as_dict(batch) for batch in DistNeighborLoader(graph, [3, 2], batch_size=30, seed=job)]
    torch.save(found, signals / f"{rank}-found")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_jobs_on_one_host_and_a_port_that_is_taken(tmp_path):
    data = make_data()
    write_data(tmp_path / "p", data, 2)

    def start():
        ports, signals = [free_port() for _ in range(2)], Path(tempfile.mkdtemp(dir=tmp_path))
        mp.start_processes(run_job, args=(tmp_path / "p", ports, signals), nprocs=5, start_method=start_method())
        return ports, signals

    ports, signals = begin_until_joined(start)

    ranks = [torch.load(signals / f"{rank}-found", weights_only=False) for rank in range(4)]
    said = (signals / "taken").read_text()
    assert str(ports[0]) in said
    assert "EADDRINUSE" in said
    for job in range(2):
        alone = NeighborLoader(data, [3, 2], batch_size=30, seed=job, device="cpu")
        assert_in_turn(ranks[2 * job : 2 * job + 2], alone)


def fail_in_a_batch(rank, folder):
    graph = open_graph(folder)
    heard = []

    def transform(out):
        if rank == 1:
            raise ZeroDivisionError("on purpose")
        return out

    loader = DistNeighborLoader(graph, [3, 2], batch_size=5, transform_sampler_output=transform, seed=1)
    for _ in range(2):
        try:
            list(loader)
        except (RankError, ZeroDivisionError) as error:
            heard.append(f"{type(error).__name__}: {error}")
    return heard


def open_damaged(rank, folder):
    try:
        open_graph(folder)
    except (PartitionError, RankError) as error:
        return f"{type(error).__name__}: {error}"
    return "opened"


def run_failures(rank, folder, copies, other):
    opened = [open_damaged(rank, copy / str(rank)) for copy in copies]
    return fail_in_a_batch(rank, folder), opened, open_damaged(rank, other if rank == 2 else folder)


@pytest.mark.slow
def test_what_one_process_fails_at_is_told_to_the_others(tmp_path):
    write_data(tmp_path / "p", make_data(), 3)
    # Each host has files of its own; those of host 2 are damaged.
    for kind in SAID:
        for rank in range(3):
            shutil.copytree(tmp_path / "p", tmp_path / kind / str(rank))
        damage(tmp_path / kind / "2", kind, 2)

    # That of another partition is whole.
    write_data(tmp_path / "other", make_data(), 3, method="range")

    ranks = run_ranks(run_failures, 3, tmp_path / "p", [tmp_path / kind for kind in SAID], tmp_path / "other")

    for rank, (heard, opened, mixed) in enumerate(ranks):
        assert "parts of one partition, got another for rank 2 than for rank 0" in mixed
        # Once and for all: what a group was broken by is told again.
        own = "ZeroDivisionError: on purpose"
        told = "RankError: rank 1 failed: ZeroDivisionError: on purpose"
        assert heard[0] == (own if rank == 1 else told)
        assert heard[1].endswith("failed: ZeroDivisionError: on purpose")
        for text, word in zip(opened, SAID.values(), strict=True):
            assert text.startswith("PartitionError: " if rank == 2 else "RankError: rank 2 failed: PartitionError: ")
            assert word in text


def open_in_vain(rank, folder):
    before = threading.active_count()
    for _ in range(2):
        with contextlib.suppress(PartitionError, RankError):
            open_graph(folder)
    return threading.active_count() - before


def test_a_graph_that_cannot_be_opened_leaves_no_thread(tmp_path):
    assert run_ranks(open_in_vain, 2, tmp_path / "nowhere") == [0, 0]


def fail_within(rank, folder):
    before = threading.active_count()
    for _ in range(2):
        with contextlib.suppress(ZeroDivisionError), open_graph(folder):
            raise ZeroDivisionError
    return threading.active_count() - before


def test_a_process_alone_closes_its_graph_where_the_program_failed_too(tmp_path):
    write_data(tmp_path / "one", make_data(), 1)

    assert run_ranks(fail_within, 1, tmp_path / "one") == [0]
