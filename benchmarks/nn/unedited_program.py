"""Programs that train on a whole graph, as PyG's `gcn.py`, `gat.py`, `hetero_conv_dblp.py`, `hgt_dblp.py` and `rgcn.py`
do.

`python benchmarks/nn/unedited_program.py gcn` trains and prints the times and losses of its epochs, as one line of
JSON. An epoch is a step and a test. Graphs are random, of the shapes of Cora, DBLP and AM.
"""

import json
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GATConv, GCNConv, HeteroConv, HGTConv, Linear, RGCNConv, SAGEConv

HIDDEN = 64


class GCN(torch.nn.Module):
    """Two layers with dropout."""

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = GCNConv(num_features, 16), GCNConv(16, num_classes)

    def forward(self, x: Any, edge_index: Any) -> Any:
        """Return scores, `[N, classes]`."""
        x = F.dropout(x, p=0.5, training=self.training)
        x = self.conv1(x, edge_index).relu()
        x = F.dropout(x, p=0.5, training=self.training)
        return self.conv2(x, edge_index)


class GAT(torch.nn.Module):
    """Two layers with eight heads and one, and dropout."""

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.conv1 = GATConv(num_features, 8, 8, dropout=0.6)
        self.conv2 = GATConv(64, num_classes, heads=1, concat=False, dropout=0.6)

    def forward(self, x: Any, edge_index: Any) -> Any:
        """Return scores, `[N, classes]`."""
        x = F.dropout(x, p=0.6, training=self.training)
        x = F.elu(self.conv1(x, edge_index))
        x = F.dropout(x, p=0.6, training=self.training)
        return self.conv2(x, edge_index)


class HeteroGNN(torch.nn.Module):
    """Two layers of a SAGEConv for each relation."""

    def __init__(self, metadata: Any, num_classes: int) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList(
            HeteroConv({kind: SAGEConv((-1, -1), HIDDEN) for kind in metadata[1]}) for _ in range(2)
        )
        self.lin = Linear(HIDDEN, num_classes)

    def forward(self, x_dict: Any, edge_index_dict: Any) -> Any:
        """Return scores of authors, `[N, classes]`."""
        for conv in self.convs:
            x_dict = {kind: F.leaky_relu(x) for kind, x in conv(x_dict, edge_index_dict).items()}
        return self.lin(x_dict["author"])


class HGT(torch.nn.Module):
    """One layer of two heads."""

    def __init__(self, metadata: Any, num_classes: int) -> None:
        super().__init__()
        self.lin_dict = torch.nn.ModuleDict({kind: Linear(-1, HIDDEN) for kind in metadata[0]})
        self.conv = HGTConv(HIDDEN, HIDDEN, metadata, 2)
        self.lin = Linear(HIDDEN, num_classes)

    def forward(self, x_dict: Any, edge_index_dict: Any) -> Any:
        """Return scores of authors, `[N, classes]`."""
        x_dict = {kind: self.lin_dict[kind](x).relu_() for kind, x in x_dict.items()}
        return self.lin(self.conv(x_dict, edge_index_dict)["author"])


class RGCN(torch.nn.Module):
    """Two layers of thirty bases; nodes have no rows."""

    def __init__(self, num_nodes: int, num_classes: int, num_relations: int) -> None:
        super().__init__()
        self.conv1 = RGCNConv(num_nodes, 16, num_relations, num_bases=30)
        self.conv2 = RGCNConv(16, num_classes, num_relations, num_bases=30)

    def forward(self, edge_index: Any, edge_type: Any) -> Any:
        """Return scores, `[N, classes]`."""
        x = F.relu(self.conv1(None, edge_index, edge_type))
        return self.conv2(x, edge_index, edge_type)


def make_masks(store: Any, count: int, trained: int, tested: int) -> None:
    """Mark nodes for training, validation and test at random."""
    order, masks = torch.randperm(count), torch.zeros(3, count, dtype=torch.bool)
    masks[0, order[:trained]], masks[1, order[trained : trained + tested]] = True, True
    masks[2, order[-tested:]] = True
    store.train_mask, store.val_mask, store.test_mask = masks


def make_cora() -> Data:
    """Make a graph of Cora's shape."""
    data = Data(x=torch.rand(2708, 1433), edge_index=torch.randint(2708, (2, 10556)), y=torch.randint(7, (2708,)))
    make_masks(data, 2708, 140, 500)
    return data


def make_dblp() -> HeteroData:
    """Make a graph of DBLP's shape."""
    shapes = {"author": (4057, 334), "paper": (14328, 4231), "term": (7723, 50), "conference": (20, 1)}
    data = HeteroData()
    for kind, shape in shapes.items():
        data[kind].x = torch.rand(*shape)
    for one, other, count in (("author", "paper", 19645), ("paper", "term", 85810), ("paper", "conference", 14328)):
        edges = torch.stack([torch.randint(shapes[kind][0], (count,)) for kind in (one, other)])
        data[one, "to", other].edge_index, data[other, "to", one].edge_index = edges, edges.flip(0)
    data["author"].y = torch.randint(4, (4057,))
    make_masks(data["author"], 4057, 400, 400)
    return data


def make_am() -> Data:
    """Make a graph of AM's shape, with relations of different sizes."""
    nodes, edges, relations = 881_680, 5_668_682, 266
    kinds = (relations * torch.rand(edges) ** 2).long()
    data = Data(edge_index=torch.randint(nodes, (2, edges)), edge_type=kinds, y=torch.randint(11, (nodes,)))
    data.num_nodes = nodes
    make_masks(data, nodes, 802, 198)
    return data


def main(name: str, epochs: int) -> None:
    """Train one program and print its epochs."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_typed = name in ("hetero_conv", "hgt")
    data = (make_dblp() if is_typed else make_am() if name == "rgcn" else make_cora()).to(device)
    if is_typed:
        model = {"hetero_conv": HeteroGNN, "hgt": HGT}[name](data.metadata(), 4).to(device)
        store, inputs = data["author"], (data.x_dict, data.edge_index_dict)
        with torch.no_grad():
            model(*inputs)
    elif name == "rgcn":
        model = RGCN(data.num_nodes, 11, 266).to(device)
        store, inputs = data, (data.edge_index, data.edge_type)
    else:
        model = {"gcn": GCN, "gat": GAT}[name](1433, 7).to(device)
        store, inputs = data, (data.x, data.edge_index)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=5e-4)

    def train() -> float:
        model.train()
        optimizer.zero_grad()
        out = model(*inputs)
        loss = F.cross_entropy(out[store.train_mask], store.y[store.train_mask])
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    @torch.no_grad()
    def test() -> list[float]:
        model.eval()
        pred = model(*inputs).argmax(dim=-1)
        return [
            int((pred[mask] == store.y[mask]).sum()) / int(mask.sum())
            for mask in (store.train_mask, store.val_mask, store.test_mask)
        ]

    times, losses = [], []
    for _ in range(epochs):
        start = time.time()
        losses.append(train())
        test()
        times.append(time.time() - start)
    print(json.dumps({"seconds": times, "losses": losses}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 200)
