"""Processes that benchmarks start."""

import multiprocessing
import os
import signal
import time
from functools import partial
from multiprocessing.connection import wait as wait_for_any
from unittest.mock import Mock

import pytest
import torch
from torch.multiprocessing import start_processes

from benchmarks.distributed import exchange
from tests.processes import start_method


def wait(rank, count, device, folder):
    with open(f"{folder}/{rank}", "w") as file:
        file.write(str(os.getpid()))
    # Longer than a test may take.
    time.sleep(3600)


def measure(folder):
    # A shell has what it runs in the background ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Processes of a benchmark import for ten seconds; how they start is no matter here.
    exchange.spawn = partial(start_processes, start_method="fork")
    exchange.run_processes(wait, 2, "cpu", folder)


@pytest.mark.full
def test_an_interrupted_benchmark_leaves_no_processes(tmp_path):
    program = multiprocessing.get_context(start_method()).Process(target=measure, args=(str(tmp_path),))
    program.start()
    try:
        while len(names := [name for name in os.listdir(tmp_path) if (tmp_path / name).stat().st_size]) < 2:
            assert not wait_for_any([program.sentinel], 0.1)
        os.kill(program.pid, signal.SIGINT)
        program.join()

        assert program.exitcode != 0
    finally:
        program.kill()
        program.join()
    for name in names:
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / name).read_text()), 0)


def test_exchanges_of_captured_plans_are_timed():
    communicator = Mock(size=2, device=torch.device("cpu"), run=lambda fn, *args: fn(*args),
                        open_segments=lambda: exchange.Itself(torch.device("cpu")))  # fmt: skip

    found = exchange.measure_segments(communicator)

    assert len(found["segment_seconds"]) == len(found["segment_rate"]) == 5
    assert min(found["segment_seconds"] + found["segment_rate"]) > 0
