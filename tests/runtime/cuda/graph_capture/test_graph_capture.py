"""A recording holds the work of its block; other threads go on in parallel."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from pyg_direct.runtime.cuda.graph_capture import record_graph


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
