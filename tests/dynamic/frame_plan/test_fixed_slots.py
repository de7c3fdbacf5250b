"""Matrices at fixed places equal the snapshots' own, forward and backward, for every position of a frame."""

import pytest
import torch

from pyg_direct.dynamic import frame_plan
from pyg_direct.dynamic.frame_plan import Slots
from pyg_direct.dynamic.sequence_edges import GCN, Factors, Mean, Parts, Sum
from pyg_direct.dynamic.snapshot_plan import SnapshotPlan
from tests.snapshots import make_snapshots

NODES, TIMES, WINDOW = 40, 6, 3


def make_plan(weighted):
    parts = []
    for number, (edges, weight) in enumerate(make_snapshots(NODES, 150, TIMES, weighted=weighted)):
        edges, weight = torch.from_numpy(edges), None if weight is None else torch.from_numpy(weight)
        # Snapshots of different sizes, one of which has more edges than go into a slice and one none at all.
        count = (edges.shape[1], 60, 0)[number % 3]
        hub = torch.stack([torch.arange(NODES), torch.full((NODES,), 7)])
        edges = torch.cat([edges[:, :count], hub], 1) if number % 3 == 0 else edges[:, :count]
        if weight is not None:
            weight = torch.cat([weight, torch.rand(NODES)])[: edges.shape[1]]
        parts.append(Parts(torch.randn(NODES, 4), edges, weight, NODES))
    return SnapshotPlan(parts, torch.device("cpu"), group_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("operator", [GCN(), GCN(add_self_loops=False), Mean(), Sum()], ids=str)
@pytest.mark.parametrize("channels", [3, 8])
def test_products_are_those_of_the_snapshots(device, operator, channels):
    for weighted in (False, True):
        plan = make_plan(weighted)
        factors = [plan.factorise(operator, time, weighted) for time in range(TIMES)]
        slots = Slots(factors, NODES, WINDOW, torch.device(device))
        x = torch.randn(NODES, WINDOW, channels)
        for first in (2, 3, 0):
            slots.move(first)
            for low, high in ((0, 3), (1, 2), (2, 3)):
                for transposed in (False, True):
                    rows = x[:, low:high]

                    got = slots.multiply(rows.to(device), low, transposed)

                    expected = plan.multiply_window(operator, rows, weighted, first + low, transposed)
                    torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-5)
        assert slots.num_bytes <= 1.2 * Slots.count_bytes(factors, NODES, WINDOW)


def test_rows_that_are_no_numbers_stay_where_they_are(device):
    plan = make_plan(True)
    slots = Slots([plan.factorise(Sum(), time) for time in range(TIMES)], NODES, WINDOW, torch.device(device))
    slots.move(0)
    x = torch.full((NODES, WINDOW, 4), torch.nan)

    out = slots.multiply(x.to(device))

    # The third snapshot has no edges.
    assert not out[:, 2].isnan().any()
    assert out[7, 0].isnan().all()


@pytest.mark.parametrize("most", [1, 100, 300])
def test_snapshots_are_sorted_so_many_edges_at_a_time(device, monkeypatch, most):
    plan = make_plan(True)
    factors = [plan.factorise(GCN(), time) for time in range(TIMES)]
    together = Slots(factors, NODES, WINDOW, torch.device(device))
    assert len(list(frame_plan._cut(together._counts, frame_plan._MOST_EDGES["cpu"]))) == 1
    monkeypatch.setattr(frame_plan, "_MOST_EDGES", {"cpu": most})

    apart = Slots(factors, NODES, WINDOW, torch.device(device))

    parts = list(frame_plan._cut(apart._counts, most))
    assert [time for part in parts for time in part] == [*range(TIMES)]
    assert 1 < len(parts) <= TIMES
    assert all(sum(apart._counts[time] for time in part) <= most for part in parts if len(part) > 1)
    assert all(torch.equal(a, b) for a, b in zip(apart._all, together._all, strict=True))


@pytest.mark.parametrize("first", [1, 0], ids=["ones first", "others first"])
def test_snapshots_of_ones_lie_beside_others_in_double_precision(device, monkeypatch, first):
    # Edges of weight one have no weights, which are then fp32, but those in other snapshots are added up.
    ones, weight = torch.arange(20), torch.rand(20, dtype=torch.float64)
    factors = [Factors(ones, None, None, None, None), Factors(ones, weight, None, None, None)]
    plain = Slots.count_bytes(factors[:1] * 2, 20, 2)
    assert Slots.count_bytes(factors, 20, 2) - plain == 2 * (2 + 2) * 4 * 20
    monkeypatch.setattr(frame_plan, "_MOST_EDGES", dict.fromkeys(("cpu", "cuda"), 1))

    here = Slots(factors[::-1] if first == 0 else factors, 20, 2, torch.device(device))
    here.move(0)

    out = here.multiply(torch.ones(20, 2, 1, dtype=torch.float64, device=device)).cpu()
    torch.testing.assert_close(out[0, [1 - first, first], 0], torch.stack([torch.tensor(20.0).double(), weight.sum()]),
                               rtol=1e-12, atol=0)  # fmt: skip


def test_nothing_is_at_places_of_graphs_without_nodes(device):
    factors = [Factors(torch.empty(0, dtype=torch.int64), None, None, None, None)] * 2
    here = Slots(factors, 0, 2, torch.device(device))
    here.move(0)

    assert here.multiply(torch.zeros(0, 2, 4, device=device)).shape == (0, 2, 4)
