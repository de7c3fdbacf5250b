"""Accuracy of a GraphSAGE trained on batches of each kind, and of an MLP without edges, over several seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import MLP, GraphSAGE

from pyg_direct.bench.loader import train
from pyg_direct.bench.result_row import Row
from pyg_direct.datasets import NodeDataset
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.loader.neighbor_loader import NeighborLoader
from pyg_direct.nn.accelerate import accelerate
from pyg_direct.runtime.cuda.device import resolve_device


def measure_accuracy(dataset: NodeDataset, kinds: Mapping[str, Mapping[str, Any]], seeds: int = 5, epochs: int = 20,
                     dropout: float = 0.3, learning_rate: float = 0.003,
                     batch_size: int = 1024) -> Iterator[Row]:  # fmt: skip
    """Measure test accuracy at the epoch of best validation, in percent; all seeds of a kind are one row.

    Args:
        dataset: A graph with features and classes.
        kinds: Options of `NeighborLoader` by name, `dtype` of the features, and `accelerate` for accelerated models;
            the first kind is the reference.
        seeds: Runs of each kind; run s of every kind starts from the same weights and order.
        epochs: Passes over the training nodes; the second half of them is validated.
        dropout, learning_rate, batch_size: Options of training.
    """
    device = resolve_device(None)
    known = dataset.to(device)
    topology = CSRTopo(known.edge_index, num_nodes=dataset.num_nodes)
    data = dataclasses.replace(known, x=None).to_data()
    limit: list[float] = []
    of_first: list[float] = []
    for kind, options in kinds.items():
        dtype = options.get("dtype", torch.float32)
        assert known.x is not None
        data.x = known.x.to(dtype)
        loader_options = {k: v for k, v in options.items() if k not in ("dtype", "accelerate")}
        scores = []
        for seed in range(seeds):
            loader = NeighborLoader(data, [15, 10, 5], dataset.train_idx, batch_size=batch_size, shuffle=True,
                                    seed=seed, **loader_options)  # fmt: skip
            torch.manual_seed(seed)
            model = GraphSAGE(dataset.num_features, 256, 3, dataset.num_classes, dropout=dropout,
                              norm="batch_norm").to(device)  # fmt: skip
            if options.get("accelerate"):
                accelerate(model)
            scores.append(100 * _train(model, loader, known, topology, data.x, epochs, learning_rate))
        mean = sum(scores) / len(scores)
        limit, of_first = limit or [mean], of_first or scores
        spread = (sum((s - mean) ** 2 for s in scores) / max(1, len(scores) - 1)) ** 0.5
        first = next(iter(kinds))
        yield Row.of(f"accuracy/{dataset.name}/{kind}", f"test, {epochs} epochs", "%", scores, limit[0],
                     f"mean of {first}",
                     f"mean {mean:.2f}, standard deviation {spread:.2f}, {mean - limit[0]:+.2f} points to {first}; "
                     f"seeds {', '.join(f'{s:.2f}' for s in scores)}")  # fmt: skip
    yield from _compare_with_mlp(known, of_first, dropout, batch_size)


def _compare_with_mlp(dataset: NodeDataset, scores: list[float], dropout: float, batch_size: int,
                      epochs: int = 40, learning_rate: float = 0.003) -> Iterator[Row]:  # fmt: skip
    """Measure the accuracy of an MLP on the same features, with enough passes, and its distance to the first kind."""
    case = f"accuracy/{dataset.name}/MLP, no edges"
    apart = []
    for seed in range(len(scores)):
        torch.manual_seed(seed)
        assert dataset.x is not None
        model = MLP([dataset.num_features, 256, 256, dataset.num_classes], dropout=dropout).to(dataset.x.device)
        apart.append(100 * _train_mlp(model, dataset, batch_size, epochs, learning_rate))
    yield Row.of(case, f"test, {epochs} epochs", "%", apart)
    yield Row.of(case, "GraphSAGE above it", "points", [a - b for a, b in zip(scores, apart, strict=True)])


def _train_mlp(model: MLP, dataset: NodeDataset, batch_size: int, epochs: int, learning_rate: float) -> float:
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    x, best = dataset.x, (0.0, 0.0)
    assert x is not None
    for _ in range(epochs):
        model.train()
        for part in dataset.train_idx[torch.randperm(dataset.train_idx.numel(), device=x.device)].split(batch_size):
            if part.numel() > 1:
                optimizer.zero_grad(set_to_none=True)
                F.cross_entropy(model(x[part].float()), dataset.y[part].long()).backward()
                optimizer.step()
        model.eval()
        with torch.no_grad():
            predicted = torch.cat([model(rows.float()).argmax(1) for rows in x.split(1 << 16)])
        scores = _score(predicted, dataset, dataset.val_idx), _score(predicted, dataset, dataset.test_idx)
        best = max(best, scores)
    return best[1]


def _train(model: GraphSAGE, loader: NeighborLoader, dataset: NodeDataset, topology: CSRTopo, x: Tensor, epochs: int,
           learning_rate: float) -> float:  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    best = (0.0, 0.0)
    for epoch in range(epochs):
        model.train()
        for batch in loader:
            train(model, optimizer, batch)
        if 2 * (epoch + 1) > epochs:
            predicted = predict(model, topology, x)
            best = max(
                best, (_score(predicted, dataset, dataset.val_idx), _score(predicted, dataset, dataset.test_idx))
            )
    return best[1]


@torch.no_grad()
def predict(model: GraphSAGE, topology: CSRTopo, x: Tensor) -> Tensor:
    """Predict classes of all nodes from all their neighbors, layer by layer, with one sparse product each."""
    model.eval()
    size = (topology.node_count, topology.node_count)
    indptr, indices = topology.indptr.to(x.device), topology.indices.to(x.device)
    ones = torch.ones(indices.numel(), device=x.device)
    adjacency = torch.sparse_csr_tensor(indptr.to(indices.dtype), indices, ones, size)
    degree = indptr.diff().clamp(min=1).view(-1, 1)
    x = x.float()
    for layer, conv in enumerate(model.convs):
        x = conv.lin_l(adjacency @ x / degree) + conv.lin_r(x)
        if layer + 1 < len(model.convs):
            x = model.norms[layer](x).relu_()
    return x.argmax(1)


def _score(predicted: Tensor, dataset: NodeDataset, nodes: Tensor) -> float:
    return float((predicted[nodes] == dataset.y[nodes]).float().mean())
