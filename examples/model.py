"""Code shared by the examples: the data set and its options, models, a training loop, and an MLP for comparison."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv
from tqdm import tqdm

from pyg_direct.datasets import NodeDataset, load_folder, load_ogb, synthetic_graph

# Scale of ogbn-products for about a minute of training on two cores.
CPU_SCALE = 0.02


def at_least_one(text: str) -> int:
    """Read an option that counts something."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def above_zero(text: str) -> float:
    """Read an option that measures something."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return number


def parse(doc: str, epochs: int, batch_size: int, scale: float | None = None) -> argparse.ArgumentParser:
    """Make the parser of the options of all examples."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if scale is None:
        parser.add_argument("--data", help="folder with graph.npz and features; by default ogbn-products, for which "
                            "ogb is needed (pip install \".[ogb]\" in the clone), else a generated graph")  # fmt: skip
    parser.add_argument("--scale", type=above_zero, default=scale,
                        help="size of the generated graph; 1 is ogbn-products")  # fmt: skip
    parser.add_argument("--device", choices=["cpu", "cuda"], help="the GPU if there is one")
    parser.add_argument("--epochs", type=at_least_one, default=epochs)
    parser.add_argument("--batch-size", type=at_least_one, default=batch_size, help="seeds of a batch, in each process")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def stay_on_host() -> None:
    """Let Gloo and NCCL of child processes listen on the loopback interface, unless the environment names another."""
    if sys.platform == "linux":
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")


def count_processes(asked: int | None, device: str, on_cpu: int = 1) -> int:
    """Count the processes: as requested, otherwise one per GPU, or `on_cpu` on a CPU."""
    if device == "cpu":
        return asked or on_cpu
    num_gpus = torch.cuda.device_count()
    if num_gpus == 0:
        sys.exit("--device must be cpu where there is no GPU, got cuda")
    if (asked or 1) > num_gpus:
        sys.exit(f"--processes must be at most {num_gpus}, one for each GPU, got {asked}; --device cpu takes any")
    return asked or num_gpus


def load_dataset(folder: str | None, scale: float | None, device: torch.device) -> NodeDataset:
    """Load the folder if one is given, otherwise ogbn-products through `ogb` without a scale, otherwise a generated
    graph.
    """
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
    """Describe the data set in one line."""
    return (
        f"{dataset.name}: {dataset.num_nodes:,} nodes, {dataset.num_edges:,} edges, {dataset.num_features} features, "
        f"{dataset.num_classes} classes; training on {device}"
    )


class LayerSAGE(torch.nn.Module):
    """GraphSAGE over bipartite layers, as in the `NeighborSampler` examples of PyG and of Quiver."""

    def __init__(self, num_features: int, hidden: int, num_classes: int, num_layers: int) -> None:
        super().__init__()
        widths = [num_features, *[hidden] * (num_layers - 1), num_classes]
        self.convs = torch.nn.ModuleList(SAGEConv(a, b) for a, b in pairwise(widths))

    def forward(self, x: torch.Tensor, adjs: list) -> torch.Tensor:
        for layer, (edge_index, _, size) in enumerate(adjs):
            x = self.convs[layer]((x, x[: size[1]]), edge_index)
            if layer < len(self.convs) - 1:
                x = F.dropout(x.relu(), p=0.3, training=self.training)
        return x


def classify_seeds(model: torch.nn.Module, batch: Data) -> torch.Tensor:
    """Classify the seeds by one of PyG's models; layers leave out the nodes that later ones do not need."""
    out = model(batch.x, batch.edge_index, num_sampled_nodes_per_hop=batch.num_sampled_nodes,
                num_sampled_edges_per_hop=batch.num_sampled_edges)  # fmt: skip
    return out[: batch.batch_size]


def fit(model: torch.nn.Module, loader: Iterable, predict: Callable, epochs: int, lr: float = 0.005,
        loss_of: Callable = F.cross_entropy, optimizers: Sequence = ()) -> None:  # fmt: skip
    """Train, by Adam or the given optimizers; `predict(batch)` returns the model's output and the target of a batch."""
    optimizers = optimizers or [torch.optim.Adam(model.parameters(), lr=lr)]
    for epoch in range(1, epochs + 1):
        model.train()
        begin, total_loss, count = time.perf_counter(), 0.0, 0
        for batch in tqdm(loader, desc=f"epoch {epoch}", leave=False, disable=None):
            for optimizer in optimizers:
                optimizer.zero_grad()
            out, right = predict(batch)
            loss = loss_of(out, right)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            total_loss += loss.detach() * len(right)
            count += len(right)
        print(f"epoch {epoch}: loss {float(total_loss) / count:.4f}, {time.perf_counter() - begin:.2f} s", flush=True)
    model.eval()


def classify_all(predict: Callable, dataset: NodeDataset) -> torch.Tensor:
    """Return the class of every node, 1,024 nodes at a time, by the `predict` of `fit`."""
    with torch.no_grad():
        return torch.cat([predict(seeds)[0].argmax(1).cpu() for seeds in torch.arange(dataset.num_nodes).split(1024)])


def train_mlp(dataset: NodeDataset, device: torch.device, hidden: int, epochs: int = 40) -> dict[str, float]:
    """Train an MLP on the same features and split, and return its accuracies."""
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
    """Compute the share of right classes in each part, from the class predicted for every node."""
    parts = {"train": dataset.train_idx, "valid": dataset.val_idx, "test": dataset.test_idx}
    return {name: float((predicted[nodes] == dataset.y[nodes]).float().mean()) for name, nodes in parts.items()}


def print_scores(predicted: torch.Tensor, dataset: NodeDataset, device: torch.device, hidden: int) -> None:
    """Print the accuracies beside the MLP's."""
    print("accuracy    train    valid     test")
    for name, scores in (("GraphSAGE", score(predicted, dataset)), ("MLP", train_mlp(dataset, device, hidden))):
        print(f"{name:9}  {scores['train']:6.2%}   {scores['valid']:6.2%}   {scores['test']:6.2%}")
