"""Errors of processes while they form a group, if one fails, dies, is frozen, or never joins."""

import contextlib
import os
import re
import signal
import threading
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from pyg_direct.distributed import DistFeature, DistGraph, PartitionInfo
from pyg_direct.errors import ArgumentError, RankError
from pyg_direct.runtime.comm import formation
from pyg_direct.runtime.comm.communicator import Communicator
from pyg_direct.runtime.comm.heartbeat import Pulse
from tests.distributed.ranks import make_data, write_data
from tests.processes import ranks_started, run_ranks, wait_for_end

CPU = torch.device("cpu")
# Seconds to wait for missing processes: far longer than a test may take, so that a full wait fails.
TIMEOUT = 3600


@contextlib.contextmanager
def lost_connections(count):
    """The next groups of Gloo lose a connection, so often, after the others have theirs."""
    real, left = dist.ProcessGroupGloo, [count]

    def make(*args):
        group = real(*args)
        if left[0] > 0:
            left[0] -= 1
            raise RuntimeError("connectFullMesh failed: connection closed by peer")
        return group

    dist.ProcessGroupGloo = make
    try:
        yield
    finally:
        dist.ProcessGroupGloo = real


def hear(make, *args, **options):
    """Return the error that a process gets."""
    try:
        make(*args, **options)
    except (ArgumentError, RankError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def agree(**options):
    communicator = Communicator(device=CPU, **{"timeout": TIMEOUT, **options})
    found = communicator.run(communicator.agree, communicator.rank)
    communicator.close()
    assert found == list(range(communicator.size))


def fail_in_many_ways(rank, folder):
    """Rank 2 fails; all go on with the next group."""
    heard, is_last, owners = {}, rank == 2, torch.arange(6) % 3
    heard["device"] = hear(DistGraph, folder, device="cpu", share_rows=True) if not is_last else hear(
        DistGraph, folder, device="meta")  # fmt: skip
    heard["silence"] = hear(agree, silence=-1 if is_last else 30)
    heard["rows"] = hear(DistFeature, torch.zeros(3 if is_last else 2, 4), PartitionInfo(CPU, rank, 3, owners))
    heard["placement"] = hear(DistGraph, folder, device="cpu", placement="gpu" if is_last else "unified")
    heard["way"] = hear(DistGraph, folder, device="cpu", share_graph=False if is_last else "auto")
    with lost_connections(2 if is_last else 0):
        heard["lost twice"] = hear(agree)
    with lost_connections(9 if is_last else 0):
        heard["always lost"] = hear(agree)
    if is_last:
        # It comes when it is given up.
        dist.barrier()
    heard["absent"] = hear(agree, timeout=1)
    if not is_last:
        dist.barrier()
    heard["after"] = hear(agree)
    group = dist.new_group([0, 1])
    if not is_last:
        heard["two"] = hear(agree, group=group)
    return heard, threading.active_count()


@pytest.mark.timeout(900)
def test_one_that_fails_is_named_at_once_and_lost_connections_are_made_anew(tmp_path):
    write_data(tmp_path / "p", make_data(60, 200), 3)

    *others, (own, _) = run_ranks(fail_in_many_ways, 3, tmp_path / "p")

    for said, num_threads in others:
        for name in ("device", "silence", "rows", "placement"):
            assert own[name].startswith("ArgumentError: ")
            assert said[name] == f"RankError: rank 2 failed: {own[name]}"
        assert said["way"] == own["way"]
        rule = "share_graph=False, share_rows and captured must be equal in all processes"
        assert f"{rule}, got others on rank 2" in said["way"]
        assert said["lost twice"] == own["lost twice"] == "nothing"
        assert said["always lost"] == own["always lost"]
        # On a busy machine Gloo may lose a connection of another rank by itself.
        words = r"RankError: the processes could not be joined in 4 attempts, at last rank \d: .*connectFullMesh .*"
        assert re.fullmatch(words, said["always lost"], re.DOTALL)
        # Another one may be late too, if the machine is busy.
        for words in (said["absent"], own["absent"]):
            assert re.fullmatch("RankError: rank ([01], )?2 did not come within 1 seconds to form a group .*", words)
        assert said["after"] == own["after"] == said["two"] == "nothing"
        # No thread of failed groups goes on.
        assert num_threads <= 2


def fail_before_connecting(rank):
    """What two ranks hear if Gloo cannot start on rank 1, for which rank 0 waits in each attempt."""
    heard = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formation, "_LEAST", 0.5)
        if rank == 1:
            patch.setattr(dist, "ProcessGroupGloo", Mock(side_effect=RuntimeError("no device")))
        heard["device"] = hear(agree, silence=1)
        patch.undo()
        if rank == 1:
            patch.setenv("GLOO_SOCKET_IFNAME", "lo,nowhere")
        heard["interface"] = hear(agree)
    heard["after"] = hear(agree)
    return heard


def test_a_rank_on_which_gloo_cannot_start_is_named():
    first, second = run_ranks(fail_before_connecting, 2)

    words = "RankError: the processes could not be joined in 4 attempts, at last rank 1: no device"
    assert first["device"] == second["device"] == words
    assert second["interface"].startswith(
        "ArgumentError: GLOO_SOCKET_IFNAME must name network interfaces of this host, "
    )
    assert second["interface"].endswith(", got nowhere")
    assert first["interface"] == f"RankError: rank 1 failed: {second['interface']}"
    assert first["after"] == second["after"] == "nothing"


def test_the_attempts_to_join_end_soon_after_the_silence():
    for silence in (30, 60, 300):
        assert sum(max(share * silence, formation._LEAST) for share in formation._ATTEMPTS) <= silence + 15


def die_while_forming(rank, folder, victim, number, is_early):
    agree()
    if rank == victim and is_early:
        # Before the first heartbeat of its thread.
        Pulse.wait_for_beat = Pulse._run = lambda self: os.kill(os.getpid(), number)
    elif rank == victim:
        dist.ProcessGroupGloo = lambda *args: os.kill(os.getpid(), number)
    torch.save(hear(agree, silence=3), folder / str(rank))
    # As if a program ended with its error, without closing.
    os._exit(0)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("victim", "number", "is_early"), [
    (2, signal.SIGKILL, False), (1, signal.SIGSTOP, False), (0, signal.SIGKILL, False), (0, signal.SIGSTOP, False),
    (2, signal.SIGKILL, True), (1, signal.SIGSTOP, True)])  # fmt: skip
def test_one_that_dies_or_freezes_while_it_connects_is_named_in_time(tmp_path, victim, number, is_early):
    others = [rank for rank in range(3) if rank != victim]

    with ranks_started(die_while_forming, 3, tmp_path, victim, number, is_early, store="tcp") as context:
        wait_for_end(context, *others)

    assert [context.processes[rank].exitcode for rank in others] == [0, 0]
    for rank in others:
        words = torch.load(tmp_path / str(rank))
        named = "rank 0, or what keeps the group together," if victim == 0 else f"rank {victim}"
        assert words.startswith(f"RankError: {named} is gone: ")
