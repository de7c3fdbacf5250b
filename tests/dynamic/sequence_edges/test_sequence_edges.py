"""Edges are sorted on a GPU that has room for them, otherwise on the host; layers find the same in both cases."""

import pytest
import torch

from pyg_direct.dynamic import sequence_edges, stream
from pyg_direct.dynamic.device_caches import Budget
from pyg_direct.dynamic.frame_plan import Slots
from pyg_direct.dynamic.sequence_edges import GCN, Chebyshev, Mean
from tests.frames import NODES, TIMES, make_signal, make_trainer


@pytest.fixture(autouse=True)
def no_edges_are_few(monkeypatch):
    monkeypatch.setattr(sequence_edges, "FEW", 0)


def make_messy_signal():
    """Snapshots with loops, some of them twice, and parallel edges, in no order."""
    signal = make_signal()
    for number, snapshot in enumerate(signal):
        ends = torch.cat([snapshot.edge_index, snapshot.edge_index[:, :20], torch.tensor([[3, 5, 3], [3, 5, 3]])], 1)
        order = torch.randperm(ends.shape[1], generator=torch.Generator().manual_seed(number))
        weight = torch.cat([snapshot.edge_attr, snapshot.edge_attr[:20] + 1, torch.tensor([2.0, 3.0, 4.0])])
        snapshot.edge_index, snapshot.edge_attr = ends[:, order], weight[order]
    return signal


@pytest.mark.gpu
@pytest.mark.parametrize("operator", [GCN(), GCN(improved=True, add_self_loops=False), Mean(), Chebyshev()], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_factors_are_those_of_the_host(operator, weighted):
    signal = make_messy_signal()
    plan, host = (stream(signal, where, keep="host").plan for where in ("cuda", "cpu"))

    for time in range(TIMES):
        got, expected = plan.factorise(operator, time, weighted), host.factorise(operator, time, weighted)

        assert got.keys.is_cuda
        assert got.keys.tolist() == expected.keys.tolist()
        for mine, theirs in zip(got[1:], expected[1:], strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                torch.testing.assert_close(mine.cpu(), theirs)


@pytest.mark.gpu
def test_equal_snapshots_give_equal_factors():
    first, second = (stream(make_messy_signal(), "cuda", keep="host").plan for _ in range(2))

    for time in range(TIMES):
        for mine, other in zip(first.factorise(GCN(), time), second.factorise(GCN(), time), strict=True):
            assert mine is other is None or torch.equal(mine, other)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["TGCN", "MPNNLSTM"])
def test_losses_are_those_of_edges_in_order_on_the_host(monkeypatch, name):
    signal = make_messy_signal()
    trainer = make_trainer(name, signal, device="cuda")

    losses = trainer.fit(3)

    monkeypatch.setattr(sequence_edges, "FEW", 10**9)
    assert losses == pytest.approx(make_trainer(name, signal, device="cuda").fit(3), rel=1e-3)
    assert trainer.history[-1]["moved_bytes"] == 0


@pytest.mark.gpu
def test_what_is_made_on_a_gpu_is_not_sent():
    signal = make_signal()
    trainer = make_trainer("TGCN", signal, device="cuda")

    trainer.fit(1)

    given = sum(v.numel() * v.element_size() for s in signal for v in (s.x, s.edge_index, s.edge_attr))
    assert trainer.history[0]["moved_bytes"] == given


@pytest.mark.gpu
def test_slots_are_made_where_edges_are():
    plans = [stream(make_messy_signal(), where, keep="host").plan for where in ("cuda", "cpu")]
    x = torch.randn(NODES, 3, 4)

    got, expected = (Slots([plan.factorise(GCN(), t) for t in range(TIMES)], NODES, 3, plan.device) for plan in plans)

    for slots in (got, expected):
        slots.move(2)
    for transposed in (False, True):
        torch.testing.assert_close(got.multiply(x.to("cuda"), 0, transposed).cpu(), expected.multiply(x, 0, transposed))
    assert (got.sent_bytes, expected.sent_bytes) == (0, expected.num_bytes)


def make_edges(monkeypatch, limit=None, free=10**9, few=0):
    """Make the edges of two snapshots of the same 1,000 edges, for a GPU that does not exist."""
    monkeypatch.setattr(sequence_edges, "FEW", few)
    monkeypatch.setattr("pyg_direct.dynamic.device_caches.free_bytes", lambda number: free)
    part = sequence_edges.Parts(None, torch.zeros(2, 1000, dtype=torch.int64), None, 1)
    gpu = torch.device("cuda", 1)
    return sequence_edges.SequenceEdges([part, part], 1, gpu, Budget(limit, gpu), None)


def test_edges_stay_on_the_host_where_a_gpu_has_no_room(monkeypatch):
    # A fifth of the free memory is taken, by the one tensor of both snapshots.
    least = 5 * 128 * 1000
    options = [{}, {"free": least}, {"free": least - 5}, {"limit": 10**9}, {"few": 1001}]

    places = [make_edges(monkeypatch, **given).device.type for given in options]

    assert places == ["cuda", "cuda", "cpu", "cpu", "cpu"]
