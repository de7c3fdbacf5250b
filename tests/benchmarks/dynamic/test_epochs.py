"""Ways to train dynamic graph networks take turns, and what they are measured beside may fail and is told."""

import contextlib
import sys
from types import SimpleNamespace

import pytest
import torch
from torch_geometric.data import Data

from benchmarks.dynamic import epochs, losses, memory_caps
from benchmarks.dynamic.ways import MODELS, Ahead, Model, Plain, Reusing, Sparse
from pyg_direct.datasets.dynamic_graphs import synthetic_dtdg
from pyg_direct.dynamic import FrameTrainer, nn
from pyg_direct.dynamic.frame_trainer import FrameCost
from pyg_direct.dynamic.snapshot import order_edges


@pytest.mark.full
def test_a_model_that_cannot_be_compiled_ends_nothing(monkeypatch):
    class Refused:
        def __init__(self, *args):
            pass

        def epoch(self):
            raise RuntimeError("no compiler\nat all")

    monkeypatch.setitem(sys.modules, "torch_geometric_temporal.nn", SimpleNamespace(recurrent=nn))
    monkeypatch.setitem(sys.modules, "torch_geometric_temporal", SimpleNamespace())
    way = "resident PyGT, torch.compile"
    monkeypatch.setitem(epochs.WAYS, way, Refused)
    edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
    signal = [Data(x=torch.randn(3, 2), edge_index=edges, edge_attr=torch.rand(3), y=torch.randn(3)) for _ in range(4)]

    rows = list(epochs.measure_dynamic_epochs({"tiny": signal}, ["T-GCN"], [way], window=2, hidden=2, epochs=1,
                                               device="cpu"))  # fmt: skip

    assert [row.note for row in rows if row.metric == f"{way}, failed"] == ["no compiler"]
    assert "ours, FrameTrainer" in {row.metric for row in rows}


def test_a_way_that_memory_does_not_hold_is_told_beside_the_others(monkeypatch):
    class TooLarge:
        def __init__(self, *args):
            pass

        def epoch(self):
            raise torch.OutOfMemoryError("no room\nfor it")

    monkeypatch.setitem(sys.modules, "torch_geometric_temporal.nn", SimpleNamespace(recurrent=nn))
    monkeypatch.setitem(sys.modules, "torch_geometric_temporal", SimpleNamespace())
    monkeypatch.setitem(memory_caps.WAYS, "PyGT", TooLarge)
    signal = {"tiny": synthetic_dtdg(40, 300, 6, 0.1)}

    rows = {row.metric: row for row in memory_caps.measure_dynamic_memory(
        signal, ["T-GCN"], ["100%"], ["PyGT", "PyGT-A"], window=3, hidden=4, epochs=2, device="cpu")}  # fmt: skip

    assert rows["PyGT, failed"].note == "no room"
    assert "PyGT over ours" not in rows
    assert rows["PyGT-A over ours"].p50 > 0
    assert rows["ours, FrameTrainer"].p50 > 0


class Sleeping:
    """Epochs that take what they are told, by a clock of their own; the making too."""

    def __init__(self, clock, made, *epochs):
        self.clock, self.epochs = clock, [*epochs]
        clock[0] += made

    def epoch(self):
        self.clock[0] += self.epochs.pop(0) if len(self.epochs) > 1 else self.epochs[0]
        return 0.5


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(epochs.time, "perf_counter", lambda: now[0])
    return now


def test_ways_take_turns_and_preparing_is_told(clock):
    order = []
    makers = {
        "slow": lambda: order.append("slow") or Sleeping(clock, 1, 10),
        "fast": lambda: order.append("fast") or Sleeping(clock, 5, 20, 8, 2, 4, 3),
    }

    courses = epochs.take_turns(makers, 3, 1000)

    slow, fast = courses["slow"], courses["fast"]
    assert (slow.measured, fast.measured) == ([10] * 3, [2, 4, 3])
    assert (slow.preparing, fast.preparing) == ([11, 10], [25, 8])
    assert (slow.making, fast.making) == (1, 5)
    assert (slow.prepare_in(slow.median), fast.prepare_in(fast.median)) == (1, 33 - 2 * 3)
    # 26 more at first, 7 less an epoch.
    assert (fast.count_to(slow), slow.count_to(fast), slow.count_to(slow)) == (4, 0, 0)
    assert order == ["slow", "fast"]


def test_slow_ways_have_one_turn(clock):
    makers = {name: lambda: Sleeping(clock, 0, 10) for name in "ab"}

    assert [len(course.measured) for course in epochs.take_turns(makers, 5, 15).values()] == [1, 1]


def test_ratios_are_of_equal_turns():
    ways = {}
    for way, seconds in (("PyGT", [8.0, 6.0, 5.0]), ("PyGT-A", [6.0, 12.0, 9.0]), ("PyGT-R", [4.0, 4.0, 5.0]),
                         ("ours, stream", [2.0, 2.0, 5.0]), ("ours, FrameTrainer", [1.0, 4.0, 3.0])):  # fmt: skip
        ways[way] = course = epochs.Course.__new__(epochs.Course)
        course.measured, course.preparing, course.losses = seconds, [2 * seconds[2], seconds[2]], [0.5]
        course.making = 0.5
        costs = [FrameCost(first, 0, {"passes": 0.25, "step": 0.002}, 0, 0) for first in range(2)]
        trainer = SimpleNamespace(history=[{"moved_bytes": 2e6}], decisions=["a"], costs=costs)
        course.run = SimpleNamespace(trainer=trainer)

    others = []
    for first in (7.0, 1.0):
        others.append(epochs.Course.__new__(epochs.Course))
        others[-1].preparing, others[-1].making = [first, 3.0], 0.25

    rows = {row.metric: row for row in epochs._tell("case", ways, "frames", others)}

    ratios = rows["PyGT-A over ours"]
    assert (ratios.p20, ratios.p50, ratios.p80) == (3, 3, 6)
    streamed = rows["PyGT over ours, stream"]
    assert (streamed.p20, streamed.p50, streamed.p80) == (1, 3, 4)
    assert rows["PyGT-R over ours, stream"].p50 == 2
    assert "PyGT-A over ours, stream" not in rows
    means = {row.metric: row for row in epochs.mean_ratios([streamed, ratios])}
    assert means["PyGT over ours, stream"].p50 == pytest.approx(3)
    assert rows["preparation over an epoch of PyGT-A"].p50 == pytest.approx(3 / 9)
    assert rows["no more time in all than PyGT-A after"].p50 == 1
    assert rows["moved to the GPU an epoch"].p50 == 2
    preparing = [rows[f"preparation, {part}"].p50 for part in ("made", "first epoch", "second epoch")]
    assert preparing == [250, 5500, 3000]
    # Of the one that had been quick enough nothing is left over.
    assert rows["preparation over an epoch of PyGT-A"].p20 == 0
    assert "passes 500.0 ms, step 4.0 ms" in rows["preparation, first epoch"].note


def test_losses_are_of_one_epoch_of_all_ways():
    told = epochs._tell_losses({"PyGT": [8.0, 4.0, 2.0, 1.0], "PyGT-A": [8.0, 4.0, 2.5], "ours": [8.0, 4.0, 2.0, 9.0]})

    assert told == {"PyGT": "loss of epoch 3 2", "PyGT-A": "loss of epoch 3 2.5, 2.5e-01 from PyGT's",
                    "ours": "loss of epoch 3 2, 0.0e+00 from PyGT's"}  # fmt: skip
    assert epochs._tell_losses({"PyGT": [8.0, 4.0, 2.0], "ours": [8.0, 5.0]})["ours"].startswith("loss of epoch 2 5")


@pytest.mark.full
def test_caps_bound_what_is_kept_and_share_structures(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_geometric_temporal.nn", SimpleNamespace(recurrent=nn))
    monkeypatch.setitem(sys.modules, "torch_geometric_temporal", SimpleNamespace())
    signal = synthetic_dtdg(40, 200, 6, 0.2)
    made = []
    monkeypatch.setattr(
        "pyg_direct.dynamic.sequence_edges.order_edges", lambda *args: made.append(args) or order_edges(*args)
    )

    rows = list(memory_caps.measure_dynamic_memory({"tiny": signal}, ["T-GCN", "MPNN-LSTM"], window=3, hidden=4,
                                                      epochs=1, device="cpu"))  # fmt: skip

    assert len(made) == len(signal) * len(memory_caps.CAPS)
    values = {(row.case, row.metric): row.p50 for row in rows}
    for kind in ("T-GCN", "MPNN-LSTM"):
        model = Model(kind, nn, 4, 40, 4)
        alone = FrameTrainer(model, signal, torch.optim.SGD(model.parameters()), window=3, device="cpu",
                             memory="10%")  # fmt: skip
        alone.fit(3)
        case = f"dynamic/tiny/{kind}/memory 10%"
        assert values[case, "moved an epoch"] == pytest.approx(alone.history[-1]["moved_bytes"] / 1e6, rel=0.1)
    # Rows of 40 nodes and 4 numbers, in six snapshots, of which half a snapshot and more is kept; targets are there.
    limited = next(row for row in rows if row.case.endswith("T-GCN/memory 10%") and row.limit)
    assert limited.limit <= limited.p50 < 1.5 * limited.limit
    assert values["dynamic/tiny/T-GCN/memory 100%", "moved an epoch"] == 0


def test_losses_are_told_beside_double_precision(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_geometric_temporal.nn", SimpleNamespace(recurrent=nn))
    monkeypatch.setitem(sys.modules, "torch_geometric_temporal", SimpleNamespace())
    signal = {"tiny": synthetic_dtdg(20, 60, 4, 0.2)}

    rows = {row.metric: row for row in losses.measure_losses(signal, ["T-GCN"], 2, 3, 3, "cpu", ["script"])}

    assert rows["ours, loss apart from PyGT's"].p80 < 1e-4
    assert 0 < rows["PyGT, loss apart from PyGT's in double precision"].p80 < 1e-4
    assert 0 < rows["ours, loss apart from PyGT's in double precision"].p80 < 1e-4
    assert rows["PyGT, edges in another order, loss apart from PyGT's"].p80 < 1e-4
    assert rows["ours in double precision, loss apart from PyGT's in double precision"].p80 < 1e-12
    assert rows["loss within 1e-09 of PyGT's after the last epoch, both in double precision"].p50 == 1
    assert rows["loss within 0.001 of PyGT's after the last epoch"].p50 == 1


def test_other_orders_of_edges_are_the_same_graph():
    snapshot = synthetic_dtdg(20, 60, 1, 0.0, weighted=True)[0]
    triples = lambda given: set(zip(*given.edge_index.tolist(), given.edge_attr.tolist(), strict=True))  # noqa: E731

    mixed = losses._mix(snapshot, 3)

    assert not torch.equal(mixed.edge_index, snapshot.edge_index)
    assert triples(mixed) == triples(snapshot)


def test_losses_that_are_farther_than_the_goal_are_told_beside_pygt_from_itself():
    near = [(1e-4, 1e-4)] * 6 + [(3e-12, 5e-12)]
    far = [(2e-3, 4e-3), (0.0, 1e-3), (1e-3, 2e-3), (0.0, 0.0), (1.0, 1.0), (4e-8, 1.0), (3e-8, 1.0)]

    script, frames, within, ratio = losses._tell_all({"a/script": near, "a/frames": far})

    assert (script.case, script.p50, script.note) == ("dynamic/all/script", 1, "of 1; farther: none")
    assert (frames.p50, frames.note) == (0, "of 1; farther: a/frames 3.0e-08, PyGT 4.0e-08 from itself")
    assert (within.p50, within.note) == (1, "of 2; farther: a/frames")
    assert (ratio.p50, ratio.note) == (2, "a/frames 2")
    assert len(list(losses._tell_all({"a/script": near}))) == 2


@pytest.mark.parametrize(("num_snapshots", "window"), [(10, 8), (24, 8), (8, 8), (9, 3)])
def test_snapshots_that_come_into_frames_are_counted(num_snapshots, window):
    frames = [set(range(first, first + window)) for first in range(num_snapshots - window + 1)]

    entering = sum(len(now - before) for before, now in zip([frames[-1], *frames], frames, strict=False))

    assert memory_caps.count_entering(num_snapshots, window) == entering


class Stream:
    """Notes what is asked of a stream."""

    def __init__(self, name, notes):
        self.name, self.notes, self.copies = name, notes, 0

    def wait_stream(self, other):
        self.notes.append(f"{self.name} waits for {other.name}")

    def record_event(self):
        self.copies += 1
        self.notes.append(f"copy {self.copies}")
        return self.copies

    def wait_event(self, event):
        self.notes.append(f"{self.name} waits for copy {event}")


def test_the_next_snapshot_is_copied_ahead_across_frames_and_epochs(monkeypatch):
    notes = []
    computing = Stream("compute", notes)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    signal = synthetic_dtdg(9, 20, 4, 0.2, weighted=True)
    way = Ahead(Model("T-GCN", nn, signal[0].num_features, 9, 2), signal, 3, torch.device("cpu"))
    way.stream = Stream("side", notes)

    visited = []
    for first in [*way.frames(), *way.frames()]:
        for time, snapshot in enumerate(way.read(first), first):
            notes.append("use")
            visited.append(time)
            for name, given in signal[time].to_dict().items():
                assert torch.equal(snapshot[name], given)
                assert snapshot[name] is not given

    assert visited == [0, 1, 2, 1, 2, 3] * 2
    copy = ["side waits for compute"]
    assert notes == [*copy, "copy 1", *(note for use in range(1, 13) for note in (
        *copy, f"copy {use + 1}", f"compute waits for copy {use}", "use"))]  # fmt: skip
    # The first of the next epoch is there.
    assert way.coming[0] == 0


@pytest.mark.temporal
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("weighted", [False, True])
def test_ways_to_copy_and_reuse_give_equal_losses(real_device, kind, weighted):
    from torch_geometric_temporal.nn import recurrent

    signal = synthetic_dtdg(30, 120, 5, 0.2, weighted=weighted)
    losses = {}
    for way in (Plain, Ahead, Reusing, Sparse):
        torch.manual_seed(0)
        model = Model(kind, recurrent, signal[0].num_features, 30, 4).to(real_device)
        run = way(model, signal, 3, real_device)
        losses[way] = [run.epoch() for _ in range(3)]

    for way in (Ahead, Reusing, Sparse):
        assert losses[way] == pytest.approx(losses[Plain], rel=1e-4), way
    if real_device.type == "cpu":
        assert losses[Ahead] == losses[Plain]
