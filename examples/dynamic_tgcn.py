"""Train a T-GCN on a dynamic graph: two lines differ from a script for PyTorch Geometric Temporal.

    python examples/dynamic_tgcn.py

uses the file given by `--data` (such as `england_covid.json` of PyTorch Geometric Temporal), otherwise a generated
graph.
"""

import argparse
import time

import torch
import torch.nn.functional as F
from model import above_zero, at_least_one

from pyg_direct.datasets.dynamic_graphs import load_temporal, synthetic_dtdg
from pyg_direct.dynamic import stream
from pyg_direct.dynamic.nn import TGCN  # was: from torch_geometric_temporal.nn.recurrent import TGCN


class RecurrentGCN(torch.nn.Module):
    def __init__(self, num_features: int, hidden: int) -> None:
        super().__init__()
        self.recurrent = TGCN(num_features, hidden)
        self.linear = torch.nn.Linear(hidden, 1)

    def forward(self, x, edge_index, edge_weight, h):
        h = self.recurrent(x, edge_index, edge_weight, h)
        return self.linear(F.relu(h)).view(-1), h


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="file of snapshots")
    parser.add_argument("--scale", type=above_zero, default=1.0, help="size of the generated graph")
    parser.add_argument("--device", help="cpu or cuda; the GPU if there is one")
    parser.add_argument("--epochs", type=at_least_one, default=20)
    parser.add_argument("--hidden", type=at_least_one, default=32)
    parser.add_argument("--lr", type=above_zero, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    if args.data:
        snapshots = load_temporal(args.data)
    else:
        nodes = max(20, int(2000 * args.scale))
        snapshots = synthetic_dtdg(nodes, 10 * nodes, num_snapshots=40, change=0.1, seed=args.seed)
    snapshots = stream(snapshots, device=args.device)  # the second line
    num_train = int(0.8 * snapshots.snapshot_count)
    train, test = snapshots[:num_train], snapshots[num_train:]
    print(f"{snapshots}: {train[0].num_nodes} nodes, {train[0].num_edges} edges at first")

    model = RecurrentGCN(train[0].num_features, args.hidden).to(train[0].y.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    h = None
    for epoch in range(1, args.epochs + 1):
        begin, cost, h = time.perf_counter(), 0.0, None
        for snapshot in train:
            y_hat, h = model(snapshot.x, snapshot.edge_index, snapshot.edge_attr, h)
            cost = cost + F.mse_loss(y_hat, snapshot.y)
        cost = cost / len(train)
        optimizer.zero_grad()
        cost.backward()
        optimizer.step()
        print(f"epoch {epoch}: loss {cost.item():.4f}, {time.perf_counter() - begin:.2f} s")

    with torch.no_grad():
        error = mean = 0.0
        for snapshot in test:
            y_hat, h = model(snapshot.x, snapshot.edge_index, snapshot.edge_attr, h)
            error += F.mse_loss(y_hat, snapshot.y).item() / len(test)
            mean += snapshot.y.var(correction=0).item() / len(test)
    print(f"T-GCN test error {error:.4f}")
    print(f"mean of the snapshot, test error {mean:.4f}")


if __name__ == "__main__":
    main()
