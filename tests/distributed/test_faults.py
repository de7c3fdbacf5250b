"""What a process of a group hears when another one fails, is killed, or never comes."""

import os
import signal
import subprocess
import sys
import time

import pytest

from pyg_direct.distributed.loader import DistNeighborLoader
from pyg_direct.errors import PartitionError, RankError
from tests.distributed.ranks import make_data, open_graph, write_data
from tests.processes import run_ranks

PROGRAM = """
import os, signal, sys, time
import torch, torch.distributed as dist
from pyg_direct.distributed import DistGraph, DistNeighborLoader
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
with DistGraph(sys.argv[1], device="cpu") as graph:
    for number, batch in enumerate(DistNeighborLoader(graph, [3, 2], batch_size=5, seed=1)):
        if rank == 1 and number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.02)
print("done")
"""


def start(folder, port, count=2):
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count),
              "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}  # fmt: skip
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    return [subprocess.Popen(command, env={**common, "RANK": str(rank)}, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True) for rank in range(count)]  # fmt: skip


@pytest.mark.slow
def test_a_killed_rank_is_named_soon(tmp_path, free_port):
    write_data(tmp_path / "p", make_data(), 2)

    alive, killed = start(tmp_path / "p", free_port)
    killed.communicate(timeout=120)
    died = time.monotonic()
    _, errors = alive.communicate(timeout=60)

    assert killed.returncode == -signal.SIGKILL
    assert alive.returncode not in (0, None)
    assert time.monotonic() - died < 60
    assert "RankError: rank 1 is gone" in errors


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


def run_failures(rank, folder, damaged):
    return fail_in_a_batch(rank, folder), open_damaged(rank, damaged)


@pytest.mark.slow
def test_what_one_process_fails_at_is_told_to_the_others(tmp_path):
    write_data(tmp_path / "p", make_data(), 3)
    write_data(tmp_path / "damaged", make_data(), 3)
    os.truncate(tmp_path / "damaged/part-00002/edge-0.indices.npy", 200)

    ranks = run_ranks(run_failures, 3, tmp_path / "p", tmp_path / "damaged")

    for rank, (heard, opened) in enumerate(ranks):
        # Once and for all: what a group was broken by is told again.
        own = "ZeroDivisionError: on purpose"
        told = "RankError: rank 1 failed: ZeroDivisionError: on purpose"
        assert heard[0] == (own if rank == 1 else told)
        assert heard[1].endswith("failed: ZeroDivisionError: on purpose")
        assert ("PartitionError" if rank == 2 else "RankError: rank 2 failed: PartitionError") in opened
        assert "must have" in opened
