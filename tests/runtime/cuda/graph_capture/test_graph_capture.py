"""A recording holds the work of its block; other threads go on in parallel."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from pyg_direct.errors import CudaError
from pyg_direct.runtime.cuda.graph_capture import CapturedGraph, record_graph
from pyg_direct.runtime.cuda.launch import on_raw_stream


@pytest.mark.parametrize("fails", [False, True])
def test_a_recording_that_begins_ends(monkeypatch, fails):
    log = []
    graph = SimpleNamespace(capture_begin=lambda pool, capture_error_mode: log.append(capture_error_mode),
                            capture_end=lambda: log.append("end"))  # fmt: skip
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)

    with pytest.raises(KeyError) if fails else nullcontext(), record_graph(graph, None):
        log.append("block")
        if fails:
            raise KeyError

    assert log == ["thread_local", "block", "end"]


@pytest.mark.gpu
def test_other_threads_allocate_and_wait_while_a_graph_is_recorded():
    graph, rows, num_bytes = torch.cuda.CUDAGraph(), torch.arange(8.0, device="cuda"), 512 << 20
    torch.cuda.empty_cache()

    def work():
        # More than torch has at hand.
        taken = torch.ones(num_bytes, dtype=torch.uint8, device="cuda")
        return int(taken[-1])

    with ThreadPoolExecutor(1) as pool:
        with record_graph(graph, torch.cuda.Stream()):
            twice = 2 * rows
            found = pool.submit(work).result()
        rows.add_(1)
        graph.replay()

    assert found == 1
    assert twice.tolist() == [2.0 * number for number in range(1, 9)]


@pytest.mark.gpu
def test_a_released_graph_ends_its_work_and_is_not_replayed_again():
    rows = torch.zeros(1 << 20, device="cuda")
    stream = torch.cuda.Stream()

    def record(raw):
        with on_raw_stream(raw, rows.device):
            rows.add_(1)

    rows.add_(0)
    torch.cuda.synchronize()
    graph = CapturedGraph(record, rows.device.index)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        for _ in range(3):
            graph.replay()

    graph.release()
    graph.release()

    stream.synchronize()
    assert torch.equal(rows, torch.full_like(rows, 3))
    with pytest.raises(CudaError):
        graph.replay()
