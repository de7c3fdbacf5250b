"""Threads that ask one stream for snapshots take turns, and find each other's results."""

import threading

import pytest
import torch

from pyg_direct.dynamic import snapshot_plan, stream
from pyg_direct.dynamic.nn import MPNNLSTM
from tests.dynamic.stream.test_stream import CHANNELS, NODES, make_list


@pytest.mark.parametrize("memory", [None, 600])
def test_threads_take_turns(monkeypatch, memory):
    waiting, seen = threading.Event(), []
    real = snapshot_plan.build_group

    def build(*args, **options):
        # The first thread is in the middle of making matrices until the other one asks, or has long had the time to.
        seen.append(threading.current_thread().name)
        if len(seen) == 1:
            other.start()
            waiting.wait(0.3)
        waiting.set()
        return real(*args, **options)

    snapshots, layer, results = make_list(2), MPNNLSTM(CHANNELS, 4, NODES, 1, 0.0).eval(), []
    given = stream(snapshots, "cpu", group_size=2, memory=memory)

    def work():
        for snapshot in given[:]:
            results.append(layer(snapshot.x, snapshot.edge_index, snapshot.edge_attr).detach())

    other = threading.Thread(target=work, name="other")
    monkeypatch.setattr(snapshot_plan, "build_group", build)
    work()
    other.join()

    assert seen[0] != "other"
    # Results of one of them serve the other; the second layer asks for single snapshots.
    assert len(seen) == 3
    for place, snapshot in enumerate(snapshots * 2):
        expected = layer(snapshot.x, snapshot.edge_index, snapshot.edge_attr)
        assert any(torch.allclose(got, expected, rtol=1e-4, atol=1e-5) for got in results), place
    assert len(results) == 4
