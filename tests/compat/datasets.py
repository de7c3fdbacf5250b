"""Generated graphs put where PyG's data set classes look for theirs, for programs that would download them.

`python -m tests.compat.datasets NAME ROOT [SCALE]`, NAME one of `reddit`, `flickr`, `cora`, `mag`, `ppi`, ROOT what the
program gives the class.
"""

import sys
from pathlib import Path

import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.datasets import OGB_MAG, PPI, Flickr, Planetoid, Reddit

from pyg_direct.datasets import synthetic_graph


def make_reddit(scale=1.0):
    """A graph of Reddit's shape: 232,965 nodes of 41 classes with 602 features; half of the edges stay in a class."""
    return synthetic_graph("reddit", scale=scale, homophily=0.5).to_data()


def make_flickr(scale=1.0):
    """Make a graph of Flickr's shape: 89,250 nodes of seven classes with 500 features."""
    num_nodes, num_edges = int(89_250 * scale), int(449_878 * scale) * 2
    return synthetic_graph("reddit", num_nodes=num_nodes, num_edges=num_edges, num_features=500, num_classes=7,
                           homophily=0.3).to_data()  # fmt: skip


def make_cora(scale=1.0):
    """A graph of Cora's shape, in the split of a graph whose test nodes are many enough to tell a point.

    Features are the words of a text, 0 and 1, as programs scale rows to a sum of one: about 18 of 1,433, most of
    them of the class. Eight of ten edges stay in their class, as in Cora.
    """
    num_nodes, num_features, num_classes = int(2708 * scale), 1433, 7
    data = synthetic_graph("reddit", num_nodes=num_nodes, num_edges=int(5278 * scale) * 2, num_features=1,
                           num_classes=num_classes, homophily=0.81).to_data()  # fmt: skip
    random = torch.Generator().manual_seed(0)
    is_own = torch.arange(num_features) % num_classes == data.y[:, None]
    chance = torch.where(is_own, 13 * num_classes / num_features, 5 / num_features)
    data.x = (torch.rand(num_nodes, num_features, generator=random) < chance).float()
    split = torch.rand(num_nodes, generator=random)
    data.train_mask, data.val_mask, data.test_mask = split < 0.25, (split >= 0.25) & (split < 0.5), split >= 0.5
    return data


def make_mag(scale=1.0):
    """A graph of ogbn-mag's shape: four types and relations; papers cite within classes, as do fields and authors."""
    random = torch.Generator().manual_seed(0)
    sizes = {"paper": 736_389, "author": 1_134_649, "institution": 8_740, "field_of_study": 59_965}
    relations = {
        ("author", "affiliated_with", "institution"): 1_043_998,
        ("author", "writes", "paper"): 7_145_660,
        ("paper", "cites", "paper"): 5_416_271,
        ("paper", "has_topic", "field_of_study"): 7_505_078,
    }
    num_classes, num_features = max(4, int(349 * scale)), 128
    data, classes = HeteroData(), {}
    centers = torch.randn(num_classes, num_features, generator=random)
    for name, size in sizes.items():
        num_nodes = max(num_classes, int(size * scale))
        classes[name] = torch.randint(num_classes, (num_nodes,), generator=random)
        data[name].x = 0.1 * centers[classes[name]] + torch.randn(num_nodes, num_features, generator=random)
    for (source, relation, target), num_edges in relations.items():
        sources = torch.randint(len(classes[source]), (max(1, int(num_edges * scale)),), generator=random)
        # Half of the edges stay in the class of their source, the others go anywhere.
        order = classes[target].argsort()
        first = torch.searchsorted(classes[target][order], torch.arange(num_classes + 1))
        start, size = first[classes[source][sources]], first.diff()[classes[source][sources]]
        within = order[start + (torch.rand(len(sources), generator=random) * size).long().clamp(max=len(order) - 1)]
        anywhere = torch.randint(len(order), (len(sources),), generator=random)
        stays = (torch.rand(len(sources), generator=random) < 0.5) & (size > 0)
        data[source, relation, target].edge_index = torch.stack([sources, torch.where(stays, within, anywhere)])
    paper = data["paper"]
    paper.y = classes["paper"]
    # Many nodes to score: a point must show on a small graph too.
    split = torch.rand(paper.num_nodes, generator=random)
    paper.train_mask, paper.val_mask, paper.test_mask = split < 0.5, (split >= 0.5) & (split < 0.9), split >= 0.9
    return data


def make_ppi(scale=1.0):
    """Graphs of PPI's shape, 20 to train on and two of each other kind, of 2,245 nodes with 50 features and 121 labels.

    A node has the labels of its group, nine of ten times; seven of ten edges stay in a group.
    """
    random = torch.Generator().manual_seed(0)
    num_nodes, num_edges, num_groups, num_tasks = int(2245 * scale), int(61_318 * scale), 10, max(8, int(121 * scale))
    centers = torch.randn(num_groups, 50, generator=random)
    tasks = torch.rand(num_groups, num_tasks, generator=random) < 0.3

    def make():
        group = torch.randint(num_groups, (num_nodes,), generator=random)
        order = group.argsort()
        first = torch.searchsorted(group[order], torch.arange(num_groups + 1))
        source, anywhere = torch.randint(num_nodes, (2, num_edges), generator=random)
        start, size = first[group[source]], first.diff()[group[source]]
        within = order[start + (torch.rand(num_edges, generator=random) * size).long()]
        target = torch.where(torch.rand(num_edges, generator=random) < 0.7, within, anywhere)
        y = tasks[group] ^ (torch.rand(num_nodes, num_tasks, generator=random) < 0.1)
        x = 0.5 * centers[group] + torch.randn(num_nodes, 50, generator=random)
        return Data(x=x, edge_index=torch.stack([source, target]), y=y.float())

    return [[make() for _ in range(count)] for count in (20, 2, 2)]


# The class of a data set, what makes it, and its attributes; graphs of PPI are many, in three files.
CLASSES = {
    "reddit": (Reddit, make_reddit, {}),
    "flickr": (Flickr, make_flickr, {}),
    "cora": (Planetoid, make_cora, {"name": "Cora", "split": "public"}),
    "mag": (OGB_MAG, make_mag, {"preprocess": "metapath2vec"}),
    "ppi": (PPI, make_ppi, {}),
}


def write(name, root, scale=1.0):
    """Write the processed files that the data set class `name` loads from `root`, and empty raw files beside them."""
    cls, make, attributes = CLASSES[name]
    # Not made by its constructor, which would download.
    dataset = cls.__new__(cls)
    dataset.__dict__.update(attributes, root=str(root))
    for path in [*dataset.raw_paths, *dataset.processed_paths]:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    for path in dataset.raw_paths:
        Path(path).touch()
    made = make(scale)
    for path, graphs in zip(dataset.processed_paths, made if isinstance(made, list) else [[made]], strict=True):
        cls.save(graphs, path)


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else 1.0)
