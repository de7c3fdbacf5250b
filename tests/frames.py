"""Models, signals and trainers for tests of training over frames."""

import torch
from torch_geometric.nn import BatchNorm, GCNConv, Sequential

from pyg_direct.datasets.dynamic_graphs import synthetic_dtdg
from pyg_direct.dynamic import FrameTrainer
from pyg_direct.dynamic.frame_trainer import run_stateless
from pyg_direct.dynamic.nn import DCRNN, GCLSTM, MPNNLSTM, TGCN, EvolveGCNH, EvolveGCNO, GConvGRU

NODES, WINDOW, TIMES, HIDDEN = 30, 3, 7, 6


class Model(torch.nn.Module):
    """A cell and a linear layer; `channels` is the size of the cell's output."""

    def __init__(self, cell, channels, keeps_state):
        super().__init__()
        self.cell, self.keeps_state = cell, keeps_state
        self.linear = torch.nn.Linear(channels, 1)

    def forward(self, x, edge_index, edge_weight, state=None):
        if not self.keeps_state:
            return self.linear(self.cell(x, edge_index, edge_weight).relu()).view(-1)
        state = self.cell(x, edge_index, edge_weight, *state if isinstance(state, tuple) else (state,))
        return self.linear((state[0] if isinstance(state, tuple) else state).relu()).view(-1), state


MODELS = {
    "TGCN": lambda: Model(TGCN(4, HIDDEN), HIDDEN, True),
    "EvolveGCNO": lambda: Model(EvolveGCNO(4), 4, False),
    "EvolveGCNH": lambda: Model(EvolveGCNH(NODES, 4), 4, False),
    "MPNNLSTM": lambda: Model(MPNNLSTM(4, HIDDEN, NODES, 1, 0.0), 2 * HIDDEN + 4, False),
    "GConvGRU": lambda: Model(GConvGRU(4, HIDDEN, 2), HIDDEN, True),
    "DCRNN": lambda: Model(DCRNN(4, HIDDEN, 2), HIDDEN, True),
    "GCLSTM": lambda: Model(GCLSTM(4, HIDDEN, 2), HIDDEN, True),
    # A convolution of PyG's, of rows that statistics of the snapshot have gone into.
    "GCNConv": lambda: Model(
        Sequential("x, e, w", [(BatchNorm(4), "x -> x"), (GCNConv(4, HIDDEN), "x, e, w -> x")]), HIDDEN, False
    ),
}


def make_signal(name="", weighted=True):
    signal = synthetic_dtdg(NODES, 120, TIMES, 0.2, 4, weighted=weighted)
    for snapshot in signal if name == "DCRNN" else ():
        # Each edge once, and some from and to every node, which its degrees need.
        ring = torch.arange(NODES)
        ends = torch.unique(torch.cat([snapshot.edge_index, torch.stack([ring, (ring + 1) % NODES])], 1), dim=1)
        snapshot.edge_index, snapshot.edge_attr = ends, torch.ones(ends.shape[1])
    return signal


def make_trainer(name, signal, **options):
    torch.manual_seed(0)
    device = options.get("device", "cpu")
    model = MODELS[name]().to(device)
    step = {} if model.keeps_state else {"step": run_stateless}
    optimizer = torch.optim.Adam(model.parameters(), lr=options.pop("rate", 0.02))
    return FrameTrainer(model, signal, optimizer, window=WINDOW, **step, **options)
