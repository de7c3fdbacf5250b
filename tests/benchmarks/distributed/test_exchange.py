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
from pyg_direct.datasets import synthetic_graph
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


def test_a_batch_stands_beside_its_bytes_at_the_rate_of_nccl():
    result = {"row_bytes": 3e6, "other_bytes": 1e6, "seconds": 6e-3, "segment_rate": [1e9, 2e9, 3e9]}

    over_bytes = exchange._compare_with_rate(result, "case")
    over_alone = exchange._compare_with_rate(result, "case", alone=4e-3)

    assert (over_bytes.p50, over_bytes.limit_name) == (pytest.approx(3.0), "its bytes at NCCL's rate")
    assert over_alone.p50 == pytest.approx(1.5)
    assert over_bytes.note == over_alone.note == "4.0 MB out of each GPU"


def test_ranks_as_hosts_exchange_over_sockets(monkeypatch):
    result = {"edges": [2e6], "seconds": 2e-3, "row_bytes": 1e6, "other_bytes": 0.0, "least_seconds": [1e-5],
              "segment_seconds": [2e-5], "segment_rate": [1e9]}  # fmt: skip
    calls = []
    monkeypatch.setattr(exchange, "run_processes", lambda *args: calls.append(args) or result)

    rows = list(exchange.measure_hosts(synthetic_graph("products", scale=0.001, device="cpu"), "tiny", [2]))

    ((work, count, device, *_),) = calls
    assert (work, count, device) == (exchange._measure_host, 2, "cuda")
    assert {row.case for row in rows} == {"distributed/tiny/sockets/2"}
    assert rows[-1].p50 == pytest.approx(2.0)
