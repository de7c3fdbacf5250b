"""Ranks that cannot connect by NCCL hear which rank it was, however long NCCL would wait."""

import os
import signal
import threading

import torch

from pyg_direct.errors import DeviceError, RankError
from pyg_direct.runtime.comm.communicator import Communicator
from pyg_direct.runtime.comm.nccl_segments import NcclSegments
from tests.processes import ranks_started, run_ranks, wait_for_end


def connect(rank, is_killed, heard):
    """What a rank hears where rank 1 has no NCCL, or ends, and NCCL waits for it on rank 0."""

    def open_segments(*args, **options):
        if rank == 1 and is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            raise RuntimeError("no such interface")
        threading.Event().wait()

    NcclSegments.open = open_segments
    # No test has time for the limit.
    communicator = Communicator(device=torch.device("cpu"), timeout=3600, silence=3)
    # As with NCCL.
    communicator._store = "store"
    try:
        communicator.run(communicator.open_segments)
    except (DeviceError, RankError) as error:
        said = f"{type(error).__name__}: {error}"
    # Not before the others have heard of it.
    communicator.close()
    if is_killed:
        (heard / str(rank)).write_text(said)
    return said


def test_a_rank_where_nccl_does_not_start_tells_the_others(tmp_path):
    first, second = run_ranks(connect, 2, False, tmp_path)

    assert second.startswith("DeviceError: NCCL must connect the GPUs of all ranks, and fails on rank 1: no such")
    assert first.startswith("RankError: rank 1 failed: DeviceError: NCCL must connect")


def test_a_rank_that_ends_while_nccl_connects_is_named(tmp_path):
    with ranks_started(connect, 2, True, tmp_path, store="tcp") as context:
        wait_for_end(context, 0)

    assert (tmp_path / "0").read_text().startswith("RankError: rank 1 is gone")
