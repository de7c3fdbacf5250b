"""Under a limit the data that saves the most copies stays on the device; copied bytes equal the forecast."""

import pytest
import torch
from torch_geometric.data import Data

from pyg_direct.dynamic import snapshot_plan, stream
from pyg_direct.dynamic.device_caches import Candidate, choose_among, choose_kept, count_entries
from pyg_direct.dynamic.sequence_edges import Sum
from pyg_direct.errors import MemoryLimitError
from pyg_direct.ops.snapshots import aggregate as snapshot_kernels
from tests.frames import NODES, TIMES, make_signal, make_trainer

# In the simulator one amount of memory is enough: each of these epochs takes it seconds.
SLOW = pytest.mark.slow
NO_REPLAY = {"cuda": {"replay": False}, "cpu": {}}


def make_pair(weighted):
    edges = torch.tensor([[0, 2, 0, 0], [1, 1, 2, 2]])
    weight = torch.ones(4) if weighted else None
    small = Data(x=torch.rand(2, 10), edge_index=edges[:, :0], y=torch.rand(2))
    return [small, Data(x=torch.rand(3, 10), edge_index=edges, edge_attr=weight, y=torch.rand(3, dtype=torch.float64))]


@pytest.mark.parametrize(("weighted", "weights"), [(True, 12), (False, 0)])
def test_a_limit_below_one_snapshot_is_told_what_it_takes(device, weighted, weights):
    # Two edges are parallel: three sources of 4 bytes, two slices with targets of 4, and offsets, one more.
    structure = 12 + 8 + 12
    told = (f"the features of one snapshot, 120 bytes \\({120 + structure + weights + 24} with edges of {structure}, "
            f"weights of {weights}, and targets and others of 24 bytes, that lie beside them\\), got 119: "
            "give at least 120 bytes$")  # fmt: skip

    with pytest.raises(MemoryLimitError, match=told):
        stream(make_pair(weighted), device, memory=119)

    assert len(stream(make_pair(weighted), device, memory=120)) == 2


def test_what_is_told_of_a_snapshot_is_what_it_takes_on_the_device(device):
    pair = make_pair(True)
    given = stream(pair, device, memory=1 << 20, group_size=1)

    matrices = given.plan.get_matrices(Sum(), 1, 2)

    # Structure and weights, as the message of the test before adds them up.
    assert sum(piece.num_bytes for piece in matrices.pieces) == 12 + 8 + 12 + 12


def test_bytes_saved_for_each_byte_held_decide():
    candidates = [Candidate("a", 10, 5), Candidate("b", 10, 10), Candidate("c", 4, 8), Candidate("d", 3, 0)]

    assert [choose_kept(candidates, n) for n in (3, 4, 13, 14, 24, 99)] == [
        set(), {"c"}, {"c"}, {"b", "c"}, {"a", "b", "c"}, {"a", "b", "c"}
    ]  # fmt: skip


def test_the_first_of_equal_ones_stay():
    candidates = [Candidate(name, 10, 10) for name in "abc"]

    assert choose_kept(candidates, 25) == {"a", "b"}


def test_smaller_ones_take_the_room_that_is_left():
    candidates = [Candidate("a", 10, 100), Candidate("b", 10, 90), Candidate("c", 5, 5)]

    assert choose_kept(candidates, 15) == {"a", "c"}


def test_candidates_of_several_lists_share_the_room():
    lists = [[Candidate("a", 10, 10), Candidate("b", 10, 0)], [Candidate("a", 4, 8), Candidate("c", 10, 5)]]

    assert choose_among(lists, 15) == ([["a"], ["a"]], 1, 5)
    assert choose_among(lists, 3) == ([[], []], 3, 23)


def frames(count, window, step=1):
    return [range(count * step)[first * step : (first + window) * step : step] for first in range(count - window + 1)]


@pytest.mark.parametrize(
    ("count", "window", "entries"),
    [
        # Frames of one epoch follow the last epoch's: 0 to 2, then 1 to 3, 2 to 4, and 0 to 2 again.
        (5, 3, [1, 1, 0, 1, 1]),
        (7, 3, [1] * 7),
        (4, 4, [0] * 4),
        (2, 1, [1, 1]),
        (1, 1, [0]),
    ],
)
def test_snapshots_come_into_frames(count, window, entries):
    counted = count_entries(frames(count, window))

    assert [counted(range(t, t + 1)) for t in range(count)] == entries


def test_groups_come_into_frames_with_any_of_their_snapshots():
    counted = count_entries(frames(8, 3))

    assert [counted(range(4)), counted(range(4, 8)), counted(range(8)), counted(range(3, 5))] == [1, 1, 0, 1]


def test_structures_of_several_snapshots_come_with_any_of_them():
    counted = count_entries(frames(8, 3))

    assert [counted(range(1), range(7, 8)), counted(range(1), range(4, 5)), counted(range(2), range(4, 8))] == [1, 2, 0]


@pytest.mark.parametrize("memory", [pytest.param(480, marks=SLOW), 2_000, pytest.param(5_000, marks=SLOW)])
def test_structures_that_come_back_are_copied_as_foreseen(device, memory):
    signal = make_signal("MPNNLSTM")
    # Snapshots at the ends lie in frames far from each other; every other one is in all frames.
    for t, like in ((5, 0), (6, 1), (4, 2)):
        signal[t].edge_index, signal[t].edge_attr = signal[like].edge_index, signal[like].edge_attr
    given = stream(signal, device, memory=memory, keep="host", group_size=1)
    trainer = make_trainer("MPNNLSTM", given, device=device, **NO_REPLAY[device.type])

    losses = trainer.fit(4)

    free = make_trainer("MPNNLSTM", signal, device=device, **NO_REPLAY[device.type])
    assert losses == pytest.approx(free.fit(4), rel=1e-4)
    foreseen = int(trainer.plan.decisions[-1].split("bring, ")[1].split(" bytes")[0].replace(",", ""))
    assert [epoch["moved_bytes"] for epoch in trainer.history[2:]] == [foreseen] * 2


# Each model with every limit; weights, in turns.
@pytest.mark.parametrize(("name", "weighted", "memory"), [
    ("TGCN", False, 5_000), ("MPNNLSTM", True, 5_000),
    *(pytest.param(name, (number + (name == "TGCN")) % 2 == 0, memory, marks=SLOW)
      for number, memory in enumerate((480, 1500, 9_000, 20_000, 60_000)) for name in ("TGCN", "MPNNLSTM")),
])  # fmt: skip
def test_epochs_copy_what_was_foreseen(device, name, weighted, memory):
    signal = make_signal(name, weighted)
    free = make_trainer(name, signal, device=device, **NO_REPLAY[device.type])
    trainer = make_trainer(name, signal, device=device, memory=memory, **NO_REPLAY[device.type])

    losses = trainer.fit(4)

    assert losses == pytest.approx(free.fit(4), rel=1e-4)
    told = trainer.plan.decisions[-1]
    assert told.startswith("memory: of what frames bring, ")
    foreseen = int(told.split("bring, ")[1].split(" bytes")[0].replace(",", ""))
    assert [epoch["moved_bytes"] for epoch in trainer.history[2:]] == [foreseen] * 2
    plan = trainer.plan
    held = plan.describe()["aggregated_bytes"] + plan.describe()["feature_bytes"] + plan.matrices.device_bytes
    assert plan.budget.used == held <= memory


@pytest.mark.gpu
@pytest.mark.parametrize("memory", [1_500, 5_000, 20_000, 60_000])
def test_what_sums_over_csr_have_beside_structures_is_counted(memory, monkeypatch):
    for name in ("MANY_NUMBERS", "MANY_MASKED", "MANY_SUMS"):
        monkeypatch.setattr(snapshot_kernels, name, 1)
    for name in ("WIDE_ROW", "WIDE_ROW_MASKED", "WIDE_ROW_ALONE"):
        monkeypatch.setattr(snapshot_kernels, name, (1, 1))
    given = stream(make_signal("MPNNLSTM"), "cuda", memory=memory, keep="host", group_size=2)
    trainer = make_trainer("MPNNLSTM", given, device="cuda", replay=False)

    losses = trainer.fit(4)

    matrices = given.plan.matrices
    here = list(matrices._here.values())
    assert any("csr" in piece.__dict__ for group in [*here, *matrices._visiting.values()] for piece in group.pieces)
    matrices._weigh()
    assert matrices.device_bytes >= sum(group.num_bytes for group in here)
    described = given.plan.describe()
    held = described["aggregated_bytes"] + described["feature_bytes"] + matrices.device_bytes
    assert given.plan.budget.used == held <= memory
    free = make_trainer("MPNNLSTM", make_signal("MPNNLSTM"), device="cuda", replay=False)
    assert losses == pytest.approx(free.fit(4), rel=1e-4)


@SLOW
def test_more_memory_never_copies_more(device):
    moved = []
    for memory in (480, 2_000, 4_000, 8_000, 16_000, 32_000):
        sequence = stream(make_signal("MPNNLSTM"), device, memory=memory, keep="host", group_size=2)
        trainer = make_trainer("MPNNLSTM", sequence, device=device, **NO_REPLAY[device.type])
        trainer.fit(3)
        moved.append(trainer.history[-1]["moved_bytes"])

    assert moved == sorted(moved, reverse=True)
    assert moved[-1] == 0 < moved[0]


def test_what_a_window_has_at_the_end_of_an_epoch_stays_in_it(device):
    # Five snapshots in frames of three: the one that all frames have is never copied again.
    trainer = make_trainer("TGCN", make_signal()[:5], device=device, memory=480, **NO_REPLAY[device.type])

    trainer.fit(3)

    # Of the four others one is kept.
    assert trainer.history[-1]["moved_bytes"] == 3 * NODES * 4 * 4


@pytest.mark.parametrize(("memory", "sizes"), [(8, [4, 2, 1]), (3, [1] * 7), (100, [4, 3])])
def test_memory_bounds_how_many_are_aggregated_at_once_and_not_how_many_share_edges(device, monkeypatch, memory, sizes):
    given = stream(make_signal(), device, memory=memory * NODES * 16, keep="host", group_size=4)
    operator, seen = make_trainer("TGCN", make_signal()).model.cell.operator, []
    real = snapshot_plan.aggregate_snapshots
    monkeypatch.setattr(
        snapshot_plan, "aggregate_snapshots", lambda x, *rest: seen.append(x.shape[1]) or real(x, *rest)
    )

    rows = [given.plan.aggregate_features(operator, t) for t in range(TIMES)]

    assert seen == sizes
    assert len(given.plan.matrices.sent_bytes) == 2
    free = stream(make_signal(), device, group_size=1).plan
    for t, part in enumerate(rows):
        torch.testing.assert_close(part, free.aggregate_features(operator, t), rtol=1e-5, atol=1e-6)


def test_rows_are_kept_or_leave_before_others_are_aggregated(device, monkeypatch):
    given = stream(make_signal(), device, memory=5 * NODES * 16, keep="host", group_size=4)
    operator, seen, kept = make_trainer("TGCN", make_signal()).model.cell.operator, [], given.plan._rows
    real = snapshot_plan.aggregate_snapshots

    def aggregate(x, *rest):
        seen.append((x.shape[1], sum((operator, True, t) in kept for t in range(TIMES))))
        return real(x, *rest)

    monkeypatch.setattr(snapshot_plan, "aggregate_snapshots", aggregate)

    for t in range(TIMES):
        given.plan.aggregate_features(operator, t)

    assert seen == [(2, 0), (1, 2), (1, 3), (1, 4), (1, 5), (1, 6)]
    pieces = {rows.untyped_storage().data_ptr(): rows.untyped_storage().nbytes() for rows in kept._here.values()}
    assert sum(pieces.values()) == kept.device_bytes == 5 * NODES * 16


def test_features_of_several_dimensions_are_aggregated_where_they_lie(device):
    signal = [Data(**{**s.to_dict(), "x": s.x.view(NODES, 2, 2)}) for s in make_signal("TGCN")]
    given = stream(signal, device, memory=10 * NODES * 16, keep="host")
    operator = make_trainer("TGCN", make_signal()).model.cell.operator

    rows = [given.plan.aggregate_features(operator, t) for t in range(TIMES)]

    flat = stream(make_signal("TGCN"), device).plan
    for t, part in enumerate(rows):
        torch.testing.assert_close(part.cpu(), flat.aggregate_features(operator, t).cpu(), rtol=1e-5, atol=1e-6)
