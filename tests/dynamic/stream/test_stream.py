"""Streams iterate as the signals they wrap; values are equal, work is shared."""

from collections import Counter

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData, TemporalData

from pyg_direct.dynamic import discretize, stream
from pyg_direct.dynamic.nn import TGCN, GConvGRU
from pyg_direct.dynamic.snapshot_plan import SnapshotPlan
from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError, MemoryLimitError
from pyg_direct.ops.snapshots import aggregate as ops
from tests.options import Refused, Seen, check_options
from tests.snapshots import make_snapshots

NODES, CHANNELS = 12, 3


def make_list(count=6, weighted=True):
    return [
        Data(x=torch.randn(NODES, CHANNELS), edge_index=torch.from_numpy(edges), y=torch.randn(NODES),
             edge_attr=None if weight is None else torch.from_numpy(weight), day=t)
        for t, (edges, weight) in enumerate(make_snapshots(NODES, 40, count, weighted=weighted))
    ]  # fmt: skip


def assert_equal(got, expected):
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        same = torch.equal(got[key] + 0, value) if isinstance(value, torch.Tensor) else got[key] == value
        assert same, key


@pytest.mark.parametrize("keep", ["auto", "device", "host"])
def test_snapshots_are_those_of_the_list(device, keep):
    snapshots = make_list()

    given = stream(snapshots, device, keep=keep)

    assert (len(given), given.snapshot_count) == (6, 6)
    for got, expected in zip(given, snapshots, strict=True):
        assert got.x.device.type == device.type
        assert_equal(got.cpu() if keep != "host" else got.apply(lambda v: (v + 0).cpu()), expected)


def test_iteration_begins_anew():
    given = stream(make_list(), "cpu")

    assert iter(given) is given
    assert [s.day for s in given] == [s.day for s in given] == list(range(6))
    next(given)
    assert [s.day for s in given] == list(range(6))


def test_what_a_snapshot_fetched_goes_with_it():
    given = stream(make_list(), "cpu", keep="host")
    first = given[0]

    first.x.add_(1)

    assert not torch.equal(first.x + 0, given[0].x + 0)
    assert given[0].x._loaded is None


def test_parts_share_the_plan():
    given = stream(make_list(), "cpu")

    first, last = given[0:4], given[4:]

    assert [[s.day for s in part] for part in (first, last)] == [[0, 1, 2, 3], [4, 5]]
    assert first.plan is last.plan is given.plan
    assert given[-1].day == 5
    with pytest.raises(IndexError, match="got 6"):
        given[6]


@pytest.mark.parametrize("keep", ["device", "host"])
def test_features_are_aggregated_once_a_group(monkeypatch, keep):
    calls = []
    real = ops.aggregate_snapshots
    monkeypatch.setattr("pyg_direct.dynamic.snapshot_plan.aggregate_snapshots", lambda *a: calls.append(1) or real(*a))
    given, layer = stream(make_list(8), "cpu", group_size=4, keep=keep), TGCN(CHANNELS, 5)

    for _ in range(3):
        for snapshot in given:
            layer(snapshot.x, snapshot.edge_index, snapshot.edge_attr)

    assert len(calls) == 2
    assert given.plan.describe()["aggregated_bytes"] == 8 * NODES * CHANNELS * 4


def test_groups_lie_at_absolute_times():
    snapshots, layer = make_list(8), TGCN(CHANNELS, 5)
    whole = stream(snapshots, "cpu", group_size=4)

    # The second snapshot brings all of its group, which begins before it.
    part = whole[1:6]
    layer(part[0].x, part[0].edge_index, part[0].edge_attr)

    operator = layer.operator
    assert [(operator, True, t) in whole.plan._rows for t in range(8)] == [True] * 4 + [False] * 4


def test_static_graphs_are_held_once():
    edges = torch.tensor([[0, 1], [1, 2]])
    snapshots = [Data(x=torch.randn(3, 2), edge_index=edges.clone(), y=torch.randn(3)) for _ in range(8)]
    given = stream(snapshots, "cpu")

    for snapshot in given:
        TGCN(2, 2)(snapshot.x, snapshot.edge_index)

    assert len(given.plan.edges) == 1


def test_node_counts_may_differ():
    parts = [Data(x=torch.randn(n, 2), edge_index=torch.tensor([[0, 1], [1, 0]])) for n in (2, 5, 3, 7)]
    layer = TGCN(2, 4)

    for given, plain in zip(stream(parts, "cpu", group_size=4), parts, strict=True):
        got = layer(given.x, given.edge_index)

        torch.testing.assert_close(got, layer(plain.x, plain.edge_index), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("counts", [(0, 0, 0), (0, 5, 0, 7)])
@pytest.mark.parametrize("memory", [None, "100%"])
def test_snapshots_may_have_no_nodes(counts, memory):
    none, ring = torch.empty(2, 0, dtype=torch.int64), torch.tensor([[0, 1], [1, 0]])
    parts = [Data(x=torch.randn(n, 2), edge_index=ring if n else none, num_nodes=n) for n in counts]
    layer = TGCN(2, 4)

    for given, plain in zip(stream(parts, "cpu", memory=memory), parts, strict=True):
        got, again = layer(given.x, given.edge_index), layer(given.x + 0, given.edge_index)

        expected = layer(plain.x, plain.edge_index)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(again, expected, rtol=1e-4, atol=1e-5)


def test_what_is_written_to_features_behind_a_layer_is_not_kept():
    layer, given = GConvGRU(CHANNELS, 4, 2), stream(make_list(1), "cpu", keep="host")
    snapshot = given[0]
    expected = layer(snapshot.x, snapshot.edge_index, snapshot.edge_attr)

    snapshot.x.add_(1)

    snapshot = given[0]
    torch.testing.assert_close(layer(snapshot.x, snapshot.edge_index, snapshot.edge_attr), expected)


def test_empty_snapshots_and_missing_weights_are_taken():
    none = torch.empty(2, 0, dtype=torch.int64)
    parts = make_list(3)
    parts[1] = Data(x=torch.randn(NODES, CHANNELS), edge_index=none, edge_attr=torch.empty(0))
    parts[2].edge_attr = None
    layer = TGCN(CHANNELS, 4)

    for given, plain in zip(stream(parts, "cpu"), parts, strict=True):
        got = layer(given.x, given.edge_index, given.edge_attr)

        torch.testing.assert_close(got, layer(plain.x, plain.edge_index, plain.edge_attr), rtol=1e-4, atol=1e-5)


def test_snapshots_of_a_group_may_all_be_empty(device):
    none = torch.empty(2, 0, dtype=torch.int64)
    parts = [Data(x=torch.randn(NODES, CHANNELS), edge_index=none) for _ in range(8)] + make_list(3, weighted=False)
    layer = TGCN(CHANNELS, 4).to(device)

    for given, plain in zip(stream(parts, device), parts, strict=True):
        got = layer(given.x, given.edge_index).cpu()

        expected = layer.cpu()(plain.x, plain.edge_index)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        layer.to(device)


def test_heterogeneous_snapshots_are_moved(device):
    data = HeteroData()
    data["a"].x, data["b"].x = torch.rand(2, 3), torch.rand(3, 3)
    data["a", "to", "b"].edge_index = torch.tensor([[0], [2]])

    (got,) = stream([data], device)

    assert got["a"].x.device.type == device.type
    assert got["a", "to", "b"].edge_index.tolist() == [[0], [2]]


@pytest.mark.temporal
@pytest.mark.parametrize("kind", ["dynamic", "static", "static features"])
@pytest.mark.parametrize("hetero", [False, True], ids=["", "hetero"])
@pytest.mark.parametrize("batch", [False, True], ids=["", "batch"])
def test_signals_of_pygt_are_taken(kind, hetero, batch):
    from torch_geometric_temporal import signal as pygt

    edges = [e for e, _ in make_snapshots(NODES, 20, 4)]
    weights = [np.random.rand(20) for _ in range(4)]
    features = [np.random.rand(NODES, 2) for _ in range(4)]
    targets = [np.random.rand(NODES) for _ in range(4)]
    given, batches = [edges, weights, features, targets], [np.zeros(NODES, dtype=int)] * 4
    if hetero:
        ends, nodes = ("a", "to", "a"), "a"
        given = [[{key: part} for part in parts]
                 for key, parts in zip((ends, ends, nodes, nodes), given, strict=True)]  # fmt: skip
        batches = [{nodes: part} for part in batches]
    # A static tensor is given once.
    static = {"dynamic": (), "static": (0, 1), "static features": (2,)}[kind]
    given = [parts[0] if place in static else parts for place, parts in enumerate(given)]
    batches = batches[0] if kind == "static" else batches
    name = {"dynamic": "Dynamic{}GraphTemporalSignal", "static": "Static{}GraphTemporalSignal",
            "static features": "Dynamic{}GraphStaticSignal"}[kind]  # fmt: skip
    signal = getattr(pygt, name.format("Hetero" if hetero else "") + ("Batch" if batch else ""))(
        *given, *([batches] if batch else []), **({} if hetero else {"extra": targets})
    )

    train, test = pygt.temporal_signal_split(stream(signal, "cpu"), train_ratio=0.5)

    reference = pygt.temporal_signal_split(signal, train_ratio=0.5)
    for got_part, part in zip((train, test), reference, strict=True):
        assert got_part.snapshot_count == 2
        for got, expected in zip(got_part, part, strict=True):
            assert type(got) is type(expected)
            for mine, theirs in zip(got.stores, expected.stores, strict=True):
                assert_equal(dict(mine.items()), dict(theirs.items()))


@pytest.mark.parametrize(
    ("signal", "options", "error", "message"),
    [
        ([], {}, ArgumentError, "at least one snapshot"),
        (5, {}, ArgumentTypeError, "got int"),
        ([5], {}, ArgumentTypeError, "got int at 0"),
        (make_list(1), {"keep": "disk"}, ArgumentError, "auto, device, host"),
        (make_list(1), {"group_size": 3}, ArgumentError, "1, 2, 4, 8, got 3"),
        (make_list(1), {"form": "x"}, ArgumentError, "form must be one of split, mask, got 'x'"),
        (
            make_list(1),
            {"memory": 100},
            MemoryLimitError,
            "one snapshot, 144 bytes .*, got 100: give at least 144 bytes$",
        ),
        (make_list(9), {"memory": "1%"}, MemoryLimitError, r"144 bytes .*, got \d\d: give at least 144 bytes$"),
    ],
)
def test_bad_arguments_are_refused(signal, options, error, message):
    with pytest.raises(error, match=message):
        stream(signal, "cpu", **options)


@pytest.mark.parametrize("keep", ["device", "host"])
def test_messages_are_handed_on(device, keep):
    snapshots = make_list(2)
    for snapshot in snapshots:
        snapshot.edge_attr = torch.rand(snapshot.num_edges, 2)

    for got, expected in zip(stream(snapshots, device, keep=keep), snapshots, strict=True):
        assert torch.equal((got.edge_attr + 0).cpu(), expected.edge_attr)


def test_bad_edges_are_refused_before_a_kernel_runs():
    bad = stream([Data(x=torch.rand(3, 2), edge_index=torch.tensor([[0], [3]]))], "cpu")[0]

    with pytest.raises(IdError, match=r"edge_index must lie in \[0, 3\), got 3, at snapshot 0$"):
        TGCN(2, 2)(bad.x, bad.edge_index)


def test_snapshots_without_features_tell_so():
    given = stream([Data(x=torch.rand(3, 2), edge_index=torch.tensor([[0], [1]]))], "cpu")
    plan = SnapshotPlan([part._replace(x=None) for part in given.plan.parts], torch.device("cpu"))

    with pytest.raises(ArgumentError, match="x must be features"):
        plan.aggregate_features(TGCN(2, 2).operator, 0)


class TestDiscretize:
    times = torch.tensor([10, 12, 19, 20, 41])
    data = TemporalData(src=torch.arange(5), dst=torch.arange(1, 6), t=times, msg=torch.rand(5, 2))

    @pytest.mark.parametrize(
        ("edge_life", "expected"),
        [
            (1, [[0, 1, 2], [3], [], [4]]),
            (2, [[0, 1, 2], [0, 1, 2, 3], [3], [4]]),
            (0, [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3, 4]]),
        ],
    )
    def test_edges_live_so_long(self, edge_life, expected):
        snapshots = discretize(self.data, 10, edge_life=edge_life)

        assert [s.edge_index[0].tolist() for s in snapshots] == expected
        assert [s.num_nodes for s in snapshots] == [6] * 4
        assert all(torch.equal(s.edge_attr, self.data.msg[s.edge_index[0]]) for s in snapshots)

    def test_snapshots_of_one_set_of_features_are_convolved(self):
        snapshots, layer = discretize(self.data, 10, edge_life=2, x=torch.rand(6, 3)), TGCN(3, 2)

        for given, plain in zip(stream(snapshots, "cpu"), snapshots, strict=True):
            assert plain.x is snapshots[0].x
            got = layer(given.x, given.edge_index)
            torch.testing.assert_close(got, layer(plain.x, plain.edge_index), rtol=1e-4, atol=1e-5)

    def test_unsorted_edges_and_features_over_time_are_taken(self):
        order = torch.tensor([4, 0, 3, 1, 2])
        x = torch.rand(4, 7, 2)
        data = Data(edge_index=torch.stack([self.data.src, self.data.dst])[:, order], time=self.times[order])

        snapshots = discretize(data, 10, x=x)

        assert [sorted(s.edge_index[0].tolist()) for s in snapshots] == [[0, 1, 2], [3], [], [4]]
        assert all(torch.equal(s.x, x[t]) for t, s in enumerate(snapshots))
        assert len(list(stream(snapshots, "cpu"))) == 4

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"window": 0}, "window must be at least 1, got 0"),
            ({"window": 1, "edge_life": -1}, "edge_life must be at least 0, got -1"),
            ({"window": float("nan")}, "window must be at least 1, got nan"),
            ({"window": 10, "start": 11}, "start must not be behind the first edge at 10, got 11"),
            ({"window": 10, "start": float("-inf")}, "start must be finite, got -inf"),
            ({"window": 10, "x": torch.rand(2, 6, 1)}, "4 snapshots, got 2"),
            ({"window": 10, "x": torch.rand(6)}, r"the shape \[N, F\] or \[T, N, F\], got \(6,\)"),
            ({"window": 10, "x": torch.rand(5, 1)}, r"between nodes in \[0, 5\), got 5"),
            ({"window": 10, "num_nodes": 5}, r"between nodes in \[0, 5\), got 5"),
            ({"window": 10, "x": torch.rand(6, 1), "num_nodes": 7}, "num_nodes must be the 6 of x, got 7"),
        ],
    )
    def test_bad_arguments_are_refused(self, options, message):
        with pytest.raises(ArgumentError, match=message):
            discretize(self.data, **options)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"window": "10"}, "window must be a number, got '10'"),
            ({"window": True}, "window must be a number, got True"),
            ({"window": 10, "start": "0"}, "start must be a number, got '0'"),
            ({"window": 10, "edge_life": 1.5}, "edge_life must be an integer, got 1.5"),
            ({"window": 10, "data": [1]}, "data must be TemporalData or Data, got list"),
        ],
    )
    def test_arguments_of_other_types_are_refused(self, options, message):
        with pytest.raises(ArgumentTypeError, match=message):
            discretize(**{"data": self.data, **options})

    def test_each_option_acts_or_is_refused(self):
        def make(**options):
            return discretize(**{"data": self.data, "window": 10, **options})

        def look(snapshots):
            return [(s.num_nodes, s.edge_index.tolist(), None if s.x is None else s.x.tolist()) for s in snapshots]

        check_options(
            discretize,
            make,
            {
                "data": (Seen(look, self.data, self.data[1:]), Refused([1], "data must be TemporalData or Data")),
                "window": (Seen(look, 10, 7), Refused("10", "window must be a number")),
                "edge_life": (Seen(look, 1, 2), Refused(1.5, "edge_life must be an integer")),
                "x": (
                    Seen(look, None, torch.rand(6, 2)),
                    Seen(look, torch.rand(6, 2), torch.rand(4, 6, 2)),
                    Refused([[1.0]] * 6, "x must be a tensor, got list"),
                ),
                "num_nodes": (
                    Seen(look, None, 9),
                    Refused(9.5, "num_nodes must be an integer, got 9.5"),
                    Refused(True, "num_nodes must be an integer, got True"),
                ),
                "start": (Seen(look, None, 3), Refused("0", "start must be a number")),
            },
        )

    def test_times_may_be_floats_below_zero(self):
        data = TemporalData(src=torch.arange(3), dst=torch.arange(3), t=torch.tensor([-0.5, 0.25, 1.0]))

        assert [s.edge_index[0].tolist() for s in discretize(data, 1)] == [[0, 1], [2]]

    @pytest.mark.parametrize("window", [3600, 3600.0, 3600.5])
    @pytest.mark.parametrize("start", [None, 1_600_000_000, 1.6e9, torch.tensor(1_600_000_000)])
    def test_seconds_of_today_are_told_apart(self, window, start):
        times = 1_600_000_000 + torch.randint(0, 10**7, (200,), generator=torch.Generator().manual_seed(0))
        data = TemporalData(src=torch.zeros(200).long(), dst=torch.zeros(200).long(), t=times)
        first = min(times.tolist()) if start is None else int(start)
        expected = Counter(int((time - first) // window) for time in times.tolist())

        snapshots = discretize(data, window, start=start)

        assert [s.num_edges for s in snapshots] == [expected[t] for t in range(max(expected) + 1)]

    def test_narrow_times_do_not_wrap(self):
        data = TemporalData(src=torch.arange(2), dst=torch.arange(2), t=torch.tensor([3, 250], dtype=torch.uint8))

        assert [s.num_edges for s in discretize(data, 100, start=-50)] == [1, 0, 0, 1]

    def test_times_that_are_no_numbers_are_refused(self):
        data = TemporalData(src=torch.arange(2), dst=torch.arange(2), t=torch.tensor([3.0, float("nan")]))

        with pytest.raises(ArgumentError, match="data must have times that are finite, got nan"):
            discretize(data, 1)

    def test_edges_must_be_there(self):
        with pytest.raises(ArgumentError, match="data must have an edge_index, got None"):
            discretize(Data(time=torch.tensor([0])), 1)

    def test_nodes_below_zero_are_refused(self):
        data = Data(edge_index=torch.tensor([[0], [-1]]), time=torch.tensor([0]))

        with pytest.raises(ArgumentError, match="between nodes of at least 0, got -1"):
            discretize(data, 1)

    def test_nodes_that_no_edge_meets_are_kept(self, real_device):
        data = Data(edge_index=torch.tensor([[0], [1]]), time=torch.tensor([0]), num_nodes=9).to(real_device)

        assert [s.num_nodes for s in discretize(data, 1)] == [9]

    def test_edges_without_times_are_refused(self):
        with pytest.raises(ArgumentError, match="a time for each of its 1 edges, got None"):
            discretize(Data(edge_index=torch.tensor([[0], [1]])), 1)
