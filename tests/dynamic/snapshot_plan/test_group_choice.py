"""Snapshots that are aggregated together: for features, once, and for other rows, by their width."""

import pytest
import torch

from pyg_direct.dynamic import sequence_edges, snapshot_plan, stream
from pyg_direct.dynamic.nn import TGCN
from pyg_direct.dynamic.sequence_edges import GCN, Chebyshev, Mean, SequenceEdges, Sum, Walk
from pyg_direct.dynamic.snapshot_plan import APART, choose_form, choose_size
from pyg_direct.errors import IdError
from pyg_direct.ops.snapshots.slice_csr import unite
from tests.frames import HIDDEN, NODES, make_signal

COUNT = 10


@pytest.fixture
def edges_on_device(monkeypatch):
    """As on a GPU, which has the edges and puts them in order."""
    monkeypatch.setattr(SequenceEdges, "are_on_device", True)


def make_list(weighted=True):
    signal = make_signal(weighted=weighted)
    return [signal[t % len(signal)].clone() for t in range(COUNT)]


def run(signal, **options):
    given, (layer, outs) = stream(signal, "cpu", **options), (make_layer(), [])
    for snapshot in given:
        outs.append(layer(snapshot.x, snapshot.edge_index, snapshot.edge_attr))
    return given.plan, outs


def make_layer():
    torch.manual_seed(0)
    return TGCN(4, HIDDEN)


@pytest.mark.parametrize("weighted", [False, True, "some"])
def test_features_are_aggregated_apart_where_the_device_has_the_edges(edges_on_device, weighted):
    signal = make_list(weighted is not False)
    if weighted == "some":
        signal[3].edge_attr = signal[8].edge_attr = None

    plan, outs = run(signal)

    for got, plain in zip(outs, signal, strict=True):
        expected = make_layer()(plain.x, plain.edge_index, plain.edge_attr)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert plan.decisions == [
        f"snapshots {low} to {high}: apart, as features are aggregated once" for low, high in ((0, 7), (8, 9))
    ]
    assert plan.describe()["matrix_bytes"] == 0


def test_snapshots_of_fewer_nodes_are_aggregated_beside_larger_ones(edges_on_device):
    signal = make_list()
    for snapshot in signal[::3]:
        kept = (snapshot.edge_index < NODES - 5).all(0)
        snapshot.x, snapshot.edge_index = snapshot.x[: NODES - 5], snapshot.edge_index[:, kept]
        snapshot.edge_attr = snapshot.edge_attr[kept]

    for got, plain in zip(run(signal)[1], signal, strict=True):
        assert got.shape[0] == plain.num_nodes
        expected = make_layer()(plain.x, plain.edge_index, plain.edge_attr)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


OPERATORS = [GCN(), GCN(improved=True), GCN(add_self_loops=False), GCN(normalize=False), Sum(), Mean(),
             Chebyshev(), Chebyshev("rw", 3.0), Walk(), Walk(is_against=True)]  # fmt: skip


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_every_operator_aggregates_snapshots_of_one_graph_as_it_does_each(monkeypatch, operator, weighted):
    # Steps against edges take each once.
    signal = [snapshot.coalesce() for snapshot in make_list(weighted)]
    expected = [aggregate(signal, operator, time) for time in range(len(signal))]
    monkeypatch.setattr(SequenceEdges, "are_on_device", True)
    together = [aggregate(signal, operator, time) for time in range(len(signal))]

    for got, rows in zip(together, expected, strict=True):
        torch.testing.assert_close(got, rows, rtol=1e-6, atol=1e-6, equal_nan=True)


def aggregate(signal, operator, time):
    """Aggregate features of a snapshot, in a sequence without earlier requests."""
    return stream(signal, "cpu").plan.aggregate_features(operator, time)


@pytest.mark.parametrize("first", [0, 3])
def test_snapshots_of_one_graph_are_taken_out_of_it_when_asked_for(edges_on_device, first):
    signal = make_list()
    plan = stream(signal, "cpu").plan
    rows = plan.aggregate_features(GCN(), first)

    single = plan.aggregate(GCN(), first, signal[first].x)

    torch.testing.assert_close(single, rows)
    assert len(plan.edges) == 8


@pytest.mark.parametrize("weighted", [False, True])
def test_edges_are_put_in_order_together(edges_on_device, monkeypatch, weighted):
    alone, together = [], []
    for name, calls in (("order_edges", alone), ("join_edges", together)):
        real = getattr(sequence_edges, name)
        monkeypatch.setattr(
            sequence_edges, name, lambda *args, real=real, calls=calls: calls.append(len(args[0])) or real(*args)
        )

    run(make_list(weighted))

    assert (alone, together) == ([], [8, 2])


def test_wrong_edges_are_told_of_at_the_turn_of_their_snapshot(edges_on_device):
    signal, layer = make_list(), make_layer()
    signal[3].edge_index[0, 0] = NODES
    given = stream(signal, "cpu")

    for _ in range(2):
        with pytest.raises(IdError, match=f"got {NODES}"):
            layer(given[0].x, given[0].edge_index, given[0].edge_attr)
    for snapshot, plain in zip(given[8:], signal[8:], strict=True):
        expected = layer(plain.x, plain.edge_index, plain.edge_attr)
        torch.testing.assert_close(layer(snapshot.x, snapshot.edge_index, snapshot.edge_attr), expected)


def test_a_size_that_is_given_stays(edges_on_device):
    plan, _ = run(make_list(), group_size=4)

    assert not any(APART in told for told in plan.decisions)
    assert sum("a weight an edge" in told for told in plan.decisions) == 3


def test_nodes_that_are_too_many_beside_each_other_are_not_laid_so(edges_on_device, monkeypatch):
    monkeypatch.setattr(snapshot_plan, "_MOST", 8 * NODES)

    plan, _ = run(make_list())

    assert [told.split(",")[0] for told in plan.decisions if APART in told] == ["snapshots 8 to 9: apart"]


def test_snapshots_apart_are_halved_where_memory_runs_out(edges_on_device, monkeypatch):
    signal, calls = make_list(), []
    from pyg_direct.ops.snapshots.aggregate import aggregate_snapshots as real

    def aggregate(x, *rest):
        calls.append(x.shape[0] // NODES)
        if calls[-1] > 2:
            raise torch.OutOfMemoryError("no room")
        return real(x, *rest)

    expected = run(signal)[1]
    monkeypatch.setattr("pyg_direct.dynamic.snapshot_plan.aggregate_snapshots", aggregate)

    plan, outs = run(signal)

    assert calls == [8, 4, 2, 2, 4, 2, 2, 2]
    assert sum("memory ran out" in told for told in plan.decisions) == 3
    torch.testing.assert_close(torch.stack(outs), torch.stack(expected))


@pytest.mark.parametrize(
    ("num_nodes", "channels", "size"),
    [(0, 8, 8), (1024, 32, 8), (1025, 32, 4), (4096, 32, 2), (8192, 32, 1), (10**6, 2, 1)],
)
def test_rows_of_a_group_fit_the_nearest_cache_of_a_cpu(num_nodes, channels, size):
    # A GPU reads more edges at once the wider their rows are.
    sizes = [choose_size(num_nodes, channels, torch.device(name)) for name in ("cpu", "cuda")]

    assert sizes == [size, 8]


@pytest.mark.parametrize(
    ("num_shared", "forms"), [(300, ["split", "mask"]), (100, ["split", "mask"]), (99, ["split", "split"])]
)
def test_edges_are_read_under_a_mask_on_a_gpu_if_snapshots_share_most(num_shared, forms):
    # Three snapshots: edges of all, and edges of one.
    shared, single = torch.arange(num_shared), torch.arange(1000, 1100)
    union = unite([torch.cat([shared, single]), shared, shared])

    found = [choose_form(union, 3 * num_shared + 100, torch.device(name)) for name in ("cpu", "cuda")]

    assert found == forms


def test_groups_are_cut_for_the_width_of_rows(monkeypatch):
    monkeypatch.setattr(snapshot_plan, "_NEAR_BYTES", 4 * NODES * 4 * 8)
    plan = stream(make_list(), "cpu").plan

    groups = [[plan._choice.find(GCN(), time, True, width)[:2] for time in (0, 5, 9)] for width in (4, 8, 32)]

    assert groups == [[(0, 8), (0, 8), (8, 10)], [(0, 4), (4, 8), (8, 10)], [(0, 1), (5, 6), (9, 10)]]
    assert len(list(plan._choice.list_known(GCN(), 5, True))) == 3


def test_choices_are_told_in_words():
    plan, _ = run(make_list())

    assert [told.split(", ")[0] for told in plan.decisions] == ["snapshots 0 to 7: split", "snapshots 8 to 9: split"]
    assert all("a weight an edge" in told and "bytes" in told for told in plan.decisions)
