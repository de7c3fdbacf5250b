"""A script for PyTorch Geometric Temporal needs at most three lines changed, and prints the same losses then."""

import difflib

import pytest

pytestmark = [
    pytest.mark.temporal,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]
CHANGES = {
    "from torch_geometric_temporal.nn.recurrent import {layer}": "from pyg_direct.dynamic.nn import {layer}",
    "train, test = temporal_signal_split(signal, train_ratio=0.75)": (
        "from pyg_direct.dynamic import stream\n"
        "train, test = temporal_signal_split(stream(signal, device='cpu'), train_ratio=0.75)"
    ),
}
# As users of signals write them: a model, a split, epochs of a loss over all snapshots or one for each.
SCRIPT = """\
import numpy as np
import torch
from torch_geometric_temporal.nn.recurrent import {layer}
from torch_geometric_temporal.signal import DynamicGraphTemporalSignal, temporal_signal_split

rng = np.random.default_rng(0)
edges = [rng.integers(0, 20, (2, 90)) for _ in range(8)]
weights = [rng.random(90).astype(np.float32) for _ in range(8)]
values = rng.standard_normal((9, 20, 4)).astype(np.float32)
signal = DynamicGraphTemporalSignal(edges, weights, list(values[:-1]), list(values[1:, :, 0]))
train, test = temporal_signal_split(signal, train_ratio=0.75)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent = {layer}({arguments})
        self.linear = torch.nn.Linear({width}, 1)

    def forward(self, x, edge_index, edge_weight, state):
        out = self.recurrent(x, edge_index, edge_weight{state})
        state = out if isinstance(out, tuple) else (out,)
        return self.linear(state[0].relu()).view(-1), state


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses = []
for epoch in range(3):
    cost, state = 0, ()
    if hasattr(model.recurrent, "reinitialize_weight"):
        model.recurrent.reinitialize_weight()
    for snapshot in train:
        y_hat, state = model(snapshot.x, snapshot.edge_index, snapshot.edge_attr, state)
        cost = cost + torch.mean((y_hat - snapshot.y) ** 2)
    cost.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(cost.item())
with torch.no_grad():
    for snapshot in test:
        y_hat, state = model(snapshot.x, snapshot.edge_index, snapshot.edge_attr, state)
        losses.append(torch.mean((y_hat - snapshot.y) ** 2).item())
"""
LAYERS = {
    "TGCN": ("4, 6", 6, ", *state"),
    "GConvGRU": ("4, 6, 2", 6, ", *state"),
    "GCLSTM": ("4, 6, 2", 6, ", *state"),
    "EvolveGCNO": ("4", 4, ""),
    "EvolveGCNH": ("20, 4", 4, ""),
    "MPNNLSTM": ("4, 6, 20, 1, 0.0", 16, ""),
}


def run(text):
    names = {"__name__": "script"}
    exec(compile(text, "script", "exec"), names)
    return names["losses"], type(names["model"].recurrent).__module__


@pytest.mark.parametrize("layer", LAYERS)
def test_three_lines_or_fewer_differ(layer):
    arguments, width, state = LAYERS[layer]
    script = SCRIPT.format(layer=layer, arguments=arguments, width=width, state=state)
    swapped = script
    for old, new in CHANGES.items():
        assert script.count(old.format(layer=layer)) == 1
        swapped = swapped.replace(old.format(layer=layer), new.format(layer=layer))

    (expected, theirs), (got, ours) = run(script), run(swapped)

    lines = [line for line in difflib.ndiff(script.splitlines(), swapped.splitlines()) if line.startswith("+ ")]
    assert len(lines) <= 3
    assert (theirs.split(".")[0], ours.split(".")[0]) == ("torch_geometric_temporal", "pyg_direct")
    assert got == pytest.approx(expected, rel=1e-4)
