"""Results of layers that depend only on features are computed once for all epochs, in streams and in frames."""

import pytest
import torch
from torch_geometric.data import Data

from pyg_direct.dynamic import FrameTrainer, snapshot_plan, stream
from pyg_direct.dynamic.nn import A3TGCN, DCRNN, TGCN, EvolveGCNO, GConvGRU
from tests.snapshots import make_snapshots

# Rows of features and of states are distinguished by their width.
NODES, CHANNELS, HIDDEN, PERIODS, TIMES = 12, 3, 7, 4, 5
LAYERS = {
    "TGCN": lambda: TGCN(CHANNELS, HIDDEN),
    "A3TGCN": lambda: A3TGCN(CHANNELS, HIDDEN, PERIODS),
    "EvolveGCNO": lambda: EvolveGCNO(CHANNELS),
    "GConvGRU": lambda: GConvGRU(CHANNELS, HIDDEN, 3),
    "DCRNN": lambda: DCRNN(CHANNELS, HIDDEN, 3),
}


def make_signal(periods):
    shape = (NODES, CHANNELS) if periods is None else (NODES, CHANNELS, periods)
    ring = torch.arange(NODES)
    signal = []
    for edges, _ in make_snapshots(NODES, 40, TIMES):
        # Each edge once, and some from and to every node, which the degrees of DCRNN need.
        ends = torch.unique(torch.cat([torch.from_numpy(edges), torch.stack([ring, (ring + 1) % NODES])], 1), dim=1)
        signal.append(Data(x=torch.randn(shape), edge_index=ends, y=torch.randn(NODES)))
    return signal


@pytest.fixture
def widths(monkeypatch):
    """Numbers a snapshot's row has, of each aggregation of one snapshot, and of each in it of a group."""
    seen = []
    real = snapshot_plan.aggregate_snapshots

    def aggregate(x, *args):
        seen.extend([x.shape[2]] * x.shape[1])
        return real(x, *args)

    monkeypatch.setattr(snapshot_plan, "aggregate_snapshots", aggregate)
    return seen


@pytest.mark.parametrize("name", LAYERS)
def test_features_are_aggregated_in_the_first_epoch_only(widths, name):
    layer, periods = LAYERS[name](), PERIODS if name == "A3TGCN" else None
    given, of_features = stream(make_signal(periods), "cpu", group_size=2), CHANNELS * (periods or 1)
    counts = []

    for _ in range(3):
        for snapshot in given:
            layer(snapshot.x, snapshot.edge_index)
        counts.append(widths.count(of_features))

    assert counts[0] >= TIMES
    assert counts == [counts[0]] * 3


@pytest.mark.parametrize(
    ("make", "matrices"),
    [(TGCN, 1), (lambda *sizes: GConvGRU(*sizes, 2), 1), (lambda *sizes: DCRNN(*sizes, 2), 2)],
    ids=["TGCN", "GConvGRU", "DCRNN"],
)
def test_features_of_a_group_are_aggregated_at_once(monkeypatch, make, matrices):
    sizes, real = [], snapshot_plan.aggregate_snapshots

    def aggregate(x, *args):
        if x.shape[2] == CHANNELS:
            sizes.append(x.shape[1])
        return real(x, *args)

    monkeypatch.setattr(snapshot_plan, "aggregate_snapshots", aggregate)
    # Inputs of the aggregated features are not kept a second time.
    monkeypatch.setattr(snapshot_plan.SnapshotPlan, "keep", None)
    layer, given = make(CHANNELS, HIDDEN), stream(make_signal(None), "cpu", group_size=4)

    for _ in range(2):
        for snapshot in given:
            layer(snapshot.x, snapshot.edge_index)

    # Both groups once for each matrix: a step along the edges and one against them have one each.
    assert TIMES == 5
    assert sizes == [4] * matrices + [1] * matrices
    assert given.plan.describe()["aggregated_bytes"] == 4 * TIMES * NODES * CHANNELS * matrices


@pytest.mark.parametrize("name", ["GConvGRU", "DCRNN"])
def test_frames_share_what_is_made_of_features(widths, name):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.linear = LAYERS[name](), torch.nn.Linear(HIDDEN, 1)

        def forward(self, x, edge_index, edge_weight, state=None):
            state = self.cell(x, edge_index, edge_weight, state)
            return self.linear(state).view(-1), state

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = FrameTrainer(model, make_signal(None), optimizer, window=3, device="cpu")

    trainer.fit(1)
    first = widths.count(CHANNELS)
    trainer.fit(2)

    # Every snapshot is in up to three frames.
    assert 0 < first < 3 * TIMES * 4
    assert widths.count(CHANNELS) == first
    assert widths.count(HIDDEN) > first


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_weights_of_a_diffusion_in_double_precision_stay_what_they_are(dtype):
    layer, signal = DCRNN(CHANNELS, HIDDEN, 3).double(), make_signal(None)
    for snapshot in signal:
        snapshot.x = snapshot.x.double()
        snapshot.edge_attr = torch.rand(snapshot.num_edges, dtype=dtype) + 0.1

    for given, plain in zip(stream(signal, "cpu", group_size=2), signal, strict=True):
        got = layer(given.x, given.edge_index, given.edge_attr)
        expected = layer(plain.x, plain.edge_index, plain.edge_attr)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
