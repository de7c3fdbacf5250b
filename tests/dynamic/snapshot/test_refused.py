"""Snapshots that layers cannot take are refused by name, number and shape, and those that they can are not."""

import pytest
import torch
from torch_geometric.data import Data

from pyg_direct.dynamic import FrameTrainer, stream
from pyg_direct.dynamic.frame_trainer import run_stateless
from pyg_direct.dynamic.nn import A3TGCN, DCRNN, GCLSTM, MPNNLSTM, TGCN, EvolveGCNH, EvolveGCNO, GConvGRU
from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError
from tests.dynamic.stream.test_stream import CHANNELS, NODES, make_list

CELLS = {
    "TGCN": lambda: TGCN(1, 4), "A3TGCN": lambda: A3TGCN(1, 4, 2), "EvolveGCNO": lambda: EvolveGCNO(4),
    "EvolveGCNH": lambda: EvolveGCNH(NODES, 4), "MPNNLSTM": lambda: MPNNLSTM(1, 4, NODES, 1, 0.0),
    "GConvGRU": lambda: GConvGRU(1, 4, 2), "GCLSTM": lambda: GCLSTM(1, 4, 2), "DCRNN": lambda: DCRNN(1, 4, 2),
}  # fmt: skip


class Embedded(torch.nn.Module):
    """Learns rows of ids."""

    def __init__(self):
        super().__init__()
        self.rows, self.cell = torch.nn.Embedding(5, CHANNELS), TGCN(CHANNELS, 1)

    def forward(self, x, edge_index, edge_weight):
        return self.cell(self.rows(x), edge_index, edge_weight).view(-1)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (torch.rand(39), ArgumentError, r"for each of 40 edges of snapshot 2, got \(39,\)$"),
        (torch.rand(1, 40), ArgumentError, r"snapshot 2, got \(1, 40\)$"),
        (torch.rand(2, 40), ArgumentError, r"edge_attr must have a row .*, got \(2, 40\)$"),
        (torch.tensor(1.0), ArgumentError, r"got \(\)$"),
        ([0.5] * 40, ArgumentTypeError, "edge_attr must be a tensor at snapshot 2, got list$"),
    ],
)
def test_attributes_of_other_numbers_of_edges_are_refused(value, error, message):
    snapshots = make_list(4)
    snapshots[2].edge_index, snapshots[2].edge_attr = torch.zeros(2, 40, dtype=torch.int64), value

    with pytest.raises(error, match=message):
        stream(snapshots, "cpu")


@pytest.mark.parametrize(("edges", "error", "message"), [
    (torch.full((2, 4), -1), IdError, r"edge_index must lie in \[0, 12\), got -1"),
    (torch.zeros(3, 4, dtype=torch.int64), ArgumentError, r"edge_index must have shape \[2, E\], got \(3, 4\)"),
    (torch.zeros(2, 4), ArgumentTypeError, "edge_index must have dtype int64 or int32, got torch.float32"),
])  # fmt: skip
@pytest.mark.parametrize("memory", [None, 100])
def test_bad_edges_are_told_by_their_snapshot(edges, error, message, memory):
    snapshots = make_list(4, weighted=False)
    # The largest, whose bytes the error about a limit names.
    snapshots[2].edge_index, snapshots[2].x = edges, torch.randn(NODES, CHANNELS, dtype=torch.float64)

    with pytest.raises(error, match=f"{message}, at snapshot 2$"):
        stream(snapshots, "cpu", memory=memory).plan.factorise(TGCN(2, 2).operator, 2)


def test_edges_to_nodes_that_only_others_have_are_refused():
    edges = torch.tensor([[3], [0]])
    alone, both = (
        stream([Data(x=torch.rand(n, 2), edge_index=edges) for n in sizes], "cpu").plan for sizes in ((5,), (5, 2))
    )

    assert alone.factorise(TGCN(2, 2).operator, 0) is not None
    with pytest.raises(IdError, match=r"edge_index must lie in \[0, 2\), got 3, at snapshot 1$"):
        both.factorise(TGCN(2, 2).operator, 1)


RING = torch.stack([torch.arange(NODES), (torch.arange(NODES) + 1) % NODES])


def make_ring(edges, weights):
    return Data(x=torch.randn(NODES, 1), edge_index=edges, edge_attr=weights, y=torch.randn(NODES))


@pytest.mark.parametrize("options", [{}, {"group_size": 4, "form": "split"}, {"group_size": 2, "memory": 1000}])
@pytest.mark.parametrize(("edges", "weights"), [
    (torch.cat([RING, RING[:, :1]], 1), torch.rand(NODES + 1) + 0.5), (RING, torch.arange(NODES).float()),
], ids=["twice", "weightless"])  # fmt: skip
def test_edges_that_cannot_be_walked_against_are_refused_where_their_snapshot_is_visited(edges, weights, options):
    cell, snapshots = CELLS["DCRNN"](), [make_ring(RING.flip(time % 2), torch.ones(NODES)) for time in range(4)]
    snapshots[2] = make_ring(edges, weights)
    given = stream(snapshots, "cpu", **options)

    for time in (0, 1, 3):
        got = cell(given[time].x, given[time].edge_index, given[time].edge_attr)
        expected = cell(snapshots[time].x, snapshots[time].edge_index, snapshots[time].edge_attr)
        torch.testing.assert_close(got, expected)

    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"must hold each edge once, .* different ones, at snapshot 2$"):
            cell(given[2].x, given[2].edge_index, given[2].edge_attr)


def run_whole(model, snapshot, state):
    out = model(snapshot.x, snapshot.edge_index, None, state)
    return out.mean(1), out


def test_frames_tell_the_snapshot_that_cannot_be_walked_against():
    cell, snapshots = DCRNN(1, NODES, 2), [make_ring(RING, None) for _ in range(5)]
    snapshots[4] = make_ring(torch.cat([RING, RING[:, :1]], 1), None)

    def train(last):
        optimizer = torch.optim.SGD(cell.parameters(), lr=0.1)
        return FrameTrainer(cell, snapshots[:last], optimizer, window=2, step=run_whole, device="cpu").train_epoch()

    assert train(4) > 0
    with pytest.raises(RuntimeError, match=r"must hold each edge once, .*, at snapshot 4$"):
        train(5)


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("part", ["x", "edge_index"])
def test_parts_that_a_snapshot_lacks_are_refused_by_layers(name, part):
    snapshots, cell = make_list(4), CELLS[name]()
    snapshots[2].num_nodes, snapshots[2][part] = NODES, None
    third = stream(snapshots, "cpu")[2]

    with pytest.raises(ArgumentTypeError, match=f"{part} must be given to the layer at snapshot 2, got None"):
        cell(third.x, third.edge_index)


@pytest.mark.parametrize("part", ["x", "edge_index"])
def test_parts_that_are_arrays_are_refused(part):
    snapshots = make_list(4)
    snapshots[2][part] = snapshots[2][part].numpy()

    with pytest.raises(ArgumentTypeError, match=f"{part} must be a tensor at snapshot 2, got ndarray: give torch.from"):
        stream(snapshots, "cpu")


@pytest.mark.parametrize("name", CELLS)
def test_features_of_one_dimension_are_refused_by_layers(name):
    snapshots, cell = make_list(4), CELLS[name]()
    for snapshot in snapshots[1:]:
        snapshot.x = torch.rand(NODES)
    third = stream(snapshots, "cpu")[2]
    trainer = FrameTrainer(
        cell, snapshots[1:], torch.optim.SGD(cell.parameters(), lr=0.1), window=2, step=run_stateless
    )

    for time, run in ((2, lambda: cell(third.x, third.edge_index, third.edge_attr)), (0, trainer.train_epoch)):
        with pytest.raises(ArgumentError, match=rf"x must have shape \[N, F, ...\] at snapshot {time}, got \(12,\)$"):
            run()


def test_a_frame_may_have_ids_of_nodes_for_features():
    snapshots, model = make_list(4), Embedded()
    for snapshot in snapshots:
        snapshot.x = torch.randint(0, 5, (NODES,))
    trainer = FrameTrainer(model, snapshots, torch.optim.SGD(model.parameters(), lr=0.1), window=2, step=run_stateless)

    assert trainer.train_epoch() > 0


@pytest.mark.parametrize(("options", "message"), [
    ({"loss": "mse"}, "loss must be callable, got 'mse'"),
    ({"step": None}, "step must be callable, got None"),
    ({"model": "TGCN"}, "model must be a torch.nn.Module, got 'TGCN'"),
    ({"optimizer": None}, "optimizer must be a torch.optim.Optimizer, got None"),
    ({"optimizer": torch.optim.LBFGS([torch.ones(1)])}, "optimizer must step without a closure, got LBFGS: loop over"),
])  # fmt: skip
def test_models_and_functions_of_other_kinds_are_refused_before_they_train(options, message):
    model = Embedded()
    given = {"model": model, "signal": make_list(4), "optimizer": torch.optim.SGD(model.parameters()), **options}

    with pytest.raises(ArgumentTypeError, match=message):
        FrameTrainer(given.pop("model"), given.pop("signal"), given.pop("optimizer"), window=2, device="cpu", **given)


def test_lists_and_flags_are_no_numbers():
    with pytest.raises(ArgumentError, match="group_size must be one of auto, 1, 2, 4, 8, got True"):
        stream(make_list(4), "cpu", group_size=True)
    with pytest.raises(ArgumentTypeError, match=r"index must be an integer or a slice, got \[1, 2\]"):
        stream(make_list(4), "cpu")[[1, 2]]
