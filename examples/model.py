"""What the examples share: the data set, and an MLP that sees no edges, to compare with."""

import os

import torch
import torch.nn.functional as F

from pyg_direct.datasets import NodeDataset, load_folder, load_ogb, synthetic_graph

# Of ogbn-products: about a minute of training on two cores.
CPU_SCALE = 0.02


def load_dataset(folder: str | None, scale: float | None, device: torch.device) -> NodeDataset:
    """The folder if one is named, else ogbn-products if `ogb` has it, else a generated graph of its shape."""
    folder = folder or os.environ.get("PYG_DIRECT_DATA")
    if folder:
        return load_folder(folder)
    if scale is None:
        try:
            return load_ogb("ogbn-products")
        except Exception as error:
            print(f"ogbn-products is not here ({type(error).__name__}: {error}); generating a graph of its shape")
    if scale is None:
        scale = 1.0 if device.type == "cuda" else CPU_SCALE
    return synthetic_graph("products", scale=scale)


def describe(dataset: NodeDataset, device: torch.device) -> str:
    """One line about the data set."""
    return (
        f"{dataset.name}: {dataset.num_nodes:,} nodes, {dataset.num_edges:,} edges, {dataset.num_features} features, "
        f"{dataset.num_classes} classes; training on {device}"
    )


def train_mlp(dataset: NodeDataset, device: torch.device, hidden: int, epochs: int = 40) -> dict[str, float]:
    """Accuracies of an MLP on the same features and split."""
    model = torch.nn.Sequential(
        torch.nn.Linear(dataset.num_features, hidden), torch.nn.ReLU(), torch.nn.Dropout(0.3),
        torch.nn.Linear(hidden, hidden), torch.nn.ReLU(), torch.nn.Dropout(0.3),
        torch.nn.Linear(hidden, dataset.num_classes),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    x, y = dataset.x[dataset.train_idx].to(device), dataset.y[dataset.train_idx].to(device)
    for _ in range(epochs):
        model.train()
        for part in torch.randperm(len(x), device=device).split(2048):
            optimizer.zero_grad()
            F.cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        predicted = torch.cat([model(part.to(device)).argmax(1).cpu() for part in dataset.x.split(1 << 16)])
    return score(predicted, dataset)


def score(predicted: torch.Tensor, dataset: NodeDataset) -> dict[str, float]:
    """Share of right classes in each part, from the class predicted for every node."""
    parts = {"train": dataset.train_idx, "valid": dataset.val_idx, "test": dataset.test_idx}
    return {name: float((predicted[nodes] == dataset.y[nodes]).float().mean()) for name, nodes in parts.items()}
