"""Programs that train on a relational database, as RelBench's for entities and for recommendation do.

`python benchmarks/nn/database_program.py entity 0.05 0 60 512` trains for 60 steps on a twentieth of tables of
rel-amazon's shape, with no workers and 512 seeds a batch. It prints the times and losses of the steps as one line of
JSON. Content is random. It needs PyTorch Frame. PyG's own loaders need pyg-lib, as seeds have times.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_frame import TensorFrame, stype
from torch_frame.data import MultiEmbeddingTensor
from torch_frame.data.stats import StatType
from torch_frame.nn import (
    EmbeddingEncoder,
    LinearEmbeddingEncoder,
    LinearEncoder,
    ResNet,
    TimestampEncoder,
)
from torch_geometric.data import HeteroData
from torch_geometric.loader import NeighborLoader, NodeLoader
from torch_geometric.nn import MLP, HeteroConv, LayerNorm, PositionalEncoding, SAGEConv
from torch_geometric.sampler import NeighborSampler, NodeSamplerInput

SIZES = {"customer": 1_850_000, "product": 506_000, "review": 12_650_000}
# Numbers, categories of a hundred, embedded texts, and times.
COLUMNS = {"customer": (0, 0, 1, 0), "product": (1, 1, 3, 0), "review": (1, 1, 2, 1)}
NUM_CATEGORIES, TEXT_WIDTH = 100, 300
CHANNELS, NUM_LAYERS, NUM_NEIGHBORS = 128, 2, [128, 64]
NUM_SEEDS = 2**18
DAY, LAST_DAY = 24 * 60 * 60, 6000


def make_database(scale: float) -> tuple[HeteroData, dict[str, Any]]:
    """Make tables whose rows are nodes, with their keys as edges in both directions; and statistics of their columns.

    Args:
        scale: Factor on the rows of each table.
    """
    data, stats = HeteroData(), {}
    for kind, size in SIZES.items():
        data[kind].tf, stats[kind] = make_table(max(int(size * scale), 1000), *COLUMNS[kind])
        data[kind].num_nodes = data[kind].tf.num_rows
    reviews = data["review"].num_nodes
    data["review"].time = torch.randint(LAST_DAY * DAY, (reviews,)).sort().values
    for other in ("customer", "product"):
        # Few have many reviews, as in the data.
        keys = (data[other].num_nodes * torch.rand(reviews) ** 2).long()
        edges = torch.stack([torch.arange(reviews), keys])
        data["review", f"f2p_{other}", other].edge_index = edges
        order = keys.sort(stable=True).indices
        data[other, f"rev_f2p_{other}", "review"].edge_index = edges.flip(0)[:, order]
    return data, stats


def make_table(size: int, numbers: int, categories: int, texts: int, times: int) -> tuple[TensorFrame, dict[str, Any]]:
    """Make a table of random content, and the statistics of its columns."""
    columns: dict[stype, Any] = {}
    stats: dict[str, Any] = {}
    names = {}

    def add(kind: stype, count: int, values: Any, stat: dict[StatType, Any]) -> None:
        columns[kind], names[kind] = values, [f"{kind.value}_{number}" for number in range(count)]
        stats.update(dict.fromkeys(names[kind], stat))

    if numbers:
        add(stype.numerical, numbers, torch.rand(size, numbers), {StatType.MEAN: 0.5, StatType.STD: 0.29})
    if categories:
        counts = list(range(NUM_CATEGORIES)), [size // NUM_CATEGORIES] * NUM_CATEGORIES
        add(stype.categorical, categories, torch.randint(NUM_CATEGORIES, (size, categories)), {StatType.COUNT: counts})
    if texts:
        offset = TEXT_WIDTH * torch.arange(texts + 1)
        values = MultiEmbeddingTensor(size, texts, torch.rand(size, TEXT_WIDTH * texts), offset)
        add(stype.embedding, texts, values, {StatType.EMB_DIM: TEXT_WIDTH})
    if times:
        # Year, month, day, weekday, hour, minute and second, all but the year from 0.
        first, most = torch.tensor([2000, 0, 0, 0, 0, 0, 0]), torch.tensor([16, 12, 28, 7, 24, 60, 60])
        parts = first + (torch.rand(size, times, 7) * most).long()
        add(stype.timestamp, times, parts, {
            StatType.YEAR_RANGE: [2000, 2015], StatType.OLDEST_TIME: first, StatType.NEWEST_TIME: first + most - 1,
            StatType.MEDIAN_TIME: first + most // 2})  # fmt: skip
    return TensorFrame(columns, names), stats


class Model(nn.Module):
    """An encoder of columns for each table, one of times, layers over the keys, and a head for the seeds' rows."""

    def __init__(self, data: HeteroData, stats: dict[str, Any], out_channels: int, norm: str) -> None:
        super().__init__()
        encoders = {stype.numerical: LinearEncoder, stype.categorical: EmbeddingEncoder,
                    stype.embedding: LinearEmbeddingEncoder, stype.timestamp: TimestampEncoder}  # fmt: skip
        self.encoders = nn.ModuleDict({
            kind: ResNet(CHANNELS, CHANNELS, 4, stats[kind], data[kind].tf.col_names_dict,
                         {column: encoders[column]() for column in data[kind].tf.col_names_dict})
            for kind in data.node_types
        })  # fmt: skip
        self.times = nn.ModuleDict({"review": PositionalEncoding(CHANNELS)})
        self.lins = nn.ModuleDict({"review": nn.Linear(CHANNELS, CHANNELS)})
        self.convs = nn.ModuleList(
            HeteroConv({kind: SAGEConv((CHANNELS, CHANNELS), CHANNELS, aggr="sum") for kind in data.edge_types})
            for _ in range(NUM_LAYERS)
        )
        self.norms = nn.ModuleList(
            nn.ModuleDict({kind: LayerNorm(CHANNELS, mode="node") for kind in data.node_types})
            for _ in range(NUM_LAYERS)
        )
        self.head = MLP(CHANNELS, out_channels=out_channels, norm=norm, num_layers=1)

    def forward(self, batch: HeteroData, kind: str) -> Tensor:
        """Return scores or embeddings of the seeds, `[B, out_channels]`."""
        seed_time = batch[kind].seed_time
        x_dict = {kind: self.encoders[kind](frame) for kind, frame in batch.tf_dict.items()}
        for name, times in batch.time_dict.items():
            days = (seed_time[batch[name].batch] - times) / DAY
            x_dict[name] = x_dict[name] + self.lins[name](self.times[name](days))
        layers: Any = zip(self.convs, self.norms, strict=True)
        for conv, norms in layers:
            x_dict = {name: norms[name](x).relu() for name, x in conv(x_dict, batch.edge_index_dict).items()}
        return self.head(x_dict[kind][: seed_time.size(0)])


class AttachLabels:
    """Transform that gives the seeds of a batch their labels."""

    def __init__(self, labels: Tensor) -> None:
        self.labels = labels

    def __call__(self, batch: HeteroData) -> HeteroData:
        """Set `batch["customer"].y`."""
        batch["customer"].y = self.labels[batch["customer"].input_id.cpu()]
        return batch


class SampledNodes(NodeLoader):
    """Neighborhoods of given nodes at given times, through the sampler and the `filter_fn` of PyG's loader."""

    def sample(self, nodes: Tensor, times: Tensor, kind: str) -> HeteroData:
        """Return the neighborhood of nodes of one type."""
        out = self.node_sampler.sample_from_nodes(NodeSamplerInput(nodes, nodes, times, kind))
        return self.filter_fn(out)


class LinkBatches(torch.utils.data.DataLoader[Any]):
    """Batches of links: the neighborhoods of their sources, of their targets and of as many random ones."""

    def __init__(self, data: HeteroData, links: Tensor, times: Tensor, **kwargs: Any) -> None:
        sampler = NeighborSampler(data, NUM_NEIGHBORS, disjoint=True, temporal_strategy="uniform", time_attr="time",
                                  share_memory=kwargs["num_workers"] > 0)  # fmt: skip
        self.parts = {kind: SampledNodes(data, sampler, kind) for kind in ("customer", "product")}
        self.links, self.times, self.num_targets = links, times, data["product"].num_nodes
        numbers: Any = range(len(times))
        super().__init__(numbers, collate_fn=self.sample, **kwargs)

    def sample(self, index: list[int]) -> tuple[HeteroData, HeteroData, HeteroData]:
        """Return three neighborhoods, at the times of the links."""
        places = torch.tensor(index)
        times = self.times[places]
        others = torch.randint(self.num_targets, (len(index),))
        return (self.parts["customer"].sample(self.links[0, places], times, "customer"),
                self.parts["product"].sample(self.links[1, places], times, "product"),
                self.parts["product"].sample(others, times, "product"))  # fmt: skip


def train_entities(data: HeteroData, stats: dict[str, Any], workers: int, size: int,
                   device: torch.device) -> Iterator[float]:  # fmt: skip
    """Classify customers at given times; yield the loss of each step, without end."""
    nodes, times = (torch.randint(most, (NUM_SEEDS,)) for most in (data["customer"].num_nodes, LAST_DAY * DAY))
    loader = NeighborLoader(data, NUM_NEIGHBORS, ("customer", nodes), input_time=times, time_attr="time",
                            transform=AttachLabels(torch.randint(2, (NUM_SEEDS,)).float()), batch_size=size,
                            temporal_strategy="uniform", shuffle=True, num_workers=workers,
                            persistent_workers=workers > 0)  # fmt: skip
    model = Model(data, stats, 1, "batch_norm").to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    model.train()
    while True:
        for batch in loader:
            batch = batch.to(device)
            optimizer.zero_grad()
            pred = model(batch, "customer").view(-1)
            loss = F.binary_cross_entropy_with_logits(pred.float(), batch["customer"].y.float())
            loss.backward()
            optimizer.step()
            yield loss.detach().item()


def train_recommendation(data: HeteroData, stats: dict[str, Any], workers: int, size: int,
                         device: torch.device) -> Iterator[float]:  # fmt: skip
    """Rank products for customers at given times; yield the loss of each step, without end."""
    links = torch.stack([torch.randint(data[kind].num_nodes, (NUM_SEEDS,)) for kind in ("customer", "product")])
    loader = LinkBatches(data, links, torch.randint(LAST_DAY * DAY, (NUM_SEEDS,)), batch_size=size, shuffle=True,
                         num_workers=workers)  # fmt: skip
    model = Model(data, stats, CHANNELS, "layer_norm").to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    model.train()
    while True:
        for batches in loader:
            sources, targets, others = (batch.to(device) for batch in batches)
            x = model(sources, "customer")
            found = (x * model(targets, "product")).sum(dim=1) - (x * model(others, "product")).sum(dim=1)
            optimizer.zero_grad()
            loss = F.softplus(-found).mean()
            loss.backward()
            optimizer.step()
            yield float(loss)


TASKS = {"entity": train_entities, "recommendation": train_recommendation}


def main(task: str, scale: float, workers: int, steps: int, size: int) -> None:
    """Train one program and print its steps."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data, stats = make_database(scale)
    torch.set_num_threads(1)
    losses = TASKS[task](data, stats, workers, size, device)
    seconds, found = [], []
    for _ in range(steps):
        start = time.perf_counter()
        found.append(next(losses))
        seconds.append(time.perf_counter() - start)
    print(json.dumps({"seconds": seconds, "losses": found}))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), *map(int, sys.argv[3:6]))
