"""Start of ranks in tests: repeated if Gloo loses a connection, ended if one of them fails."""

import os
import time

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

from tests import processes
from tests.processes import ranks_started, run_ranks, wait_for_end

START, RUN = processes._enter, processes._run


def lose_once(rank, note):
    """Rank 1 is lost while it connects, the first time; the other one waits for it."""

    def fail(*args, **options):
        note.touch()
        raise RuntimeError("Gloo connectFullMesh failed with: Connection closed by peer")

    if rank == 1 and not note.exists():
        dist.init_process_group = fail


def start_in_vain(rank, fn, count, folder, address, args, environment):
    lose_once(rank, args[0])
    START(rank, fn, count, folder, address, args, environment)


def run_in_vain(rank, fn, count, folder, args, environment):
    lose_once(rank, args[0])
    RUN(rank, fn, count, folder, args, environment)


def say(rank, note):
    (note.parent / str(rank)).write_text(str(dist.get_world_size()))
    return rank


def test_ranks_that_are_lost_while_they_connect_are_started_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_run", run_in_vain)

    assert run_ranks(say, 2, tmp_path / "lost") == [0, 1]
    assert (tmp_path / "lost").exists()


def test_ranks_that_a_test_looks_at_are_started_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_enter", start_in_vain)

    with ranks_started(say, 2, tmp_path / "lost", store="tcp") as context:
        wait_for_end(context, 0, 1)

    assert (tmp_path / "lost").exists()
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["2", "2"]


def fail_or_sleep(rank):
    if rank == 1:
        raise ZeroDivisionError("on purpose")
    time.sleep(3600)


def test_an_error_of_one_ends_the_others_and_is_shown():
    with pytest.raises(mp.ProcessRaisedException, match="on purpose"), ranks_started(fail_or_sleep, 2) as context:
        wait_for_end(context, 0)

    for process in context.processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


def lose_always(count):
    count.append(1)
    raise processes.LostError("connectFullMesh failed")


def test_a_rank_that_is_always_lost_is_told():
    tries = []

    with pytest.raises(processes.LostError, match="connectFullMesh"):
        processes.begin_until_joined(lambda: lose_always(tries))

    assert len(tries) == processes._ATTEMPTS
