"""A random graph with types, shaped like IGBH-Full of the Illinois Graph Benchmark, with classes that can be learned.

Every node of every type has a class. An edge is mostly drawn inside a class, so that features and neighbors of all
types carry it. Degrees are skewed at both ends, as in `synthetic.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import HeteroData

from pyg_direct.datasets.dataset import (
    check_device,
    check_float_dtype,
    check_fraction,
    check_int,
    check_not_negative,
    check_positive,
    make_generator,
)
from pyg_direct.datasets.synthetic import CHUNK_EDGES, draw_classes, draw_split, fill_features, skew_position
from pyg_direct.runtime.host.pages import use_large_pages


class Relation(NamedTuple):
    """Relation of a graph at scale 1.

    Attributes:
        source, name, target: As in PyG; `rev_` is put before the name of the reverse relation.
        num_edges: Edges.
        source_hub, target_hub: Largest expected degree of each end, in mean degrees; a `source_hub` of 0 stands for
            one edge of each of so many sources.
        is_reversed: The reverse relation is there too.
    """

    source: str
    name: str
    target: str
    num_edges: int
    source_hub: float
    target_hub: float
    is_reversed: bool = True


# Nodes, and edges of the first four relations, as published (Khatua et al., KDD 2023); the number of papers with a
# journal or a conference is not, and is the share of the Microsoft Academic Graph. Hubs are rough.
NODES = {"paper": 269_346_174, "author": 277_220_883, "institute": 26_918, "fos": 712_960, "journal": 49_052,
         "conference": 4_547}  # fmt: skip
RELATIONS = (
    Relation("paper", "cites", "paper", 3_996_442_004, 50, 2000, is_reversed=False),
    Relation("paper", "written_by", "author", 716_761_549, 10, 300),
    Relation("paper", "topic", "fos", 1_050_280_600, 5, 5000),
    Relation("author", "affiliated_to", "institute", 48_521_486, 0, 50),
    Relation("paper", "published", "journal", 90_000_000, 0, 100),
    Relation("paper", "venue", "conference", 5_000_000, 0, 20),
)
# Labeled papers of MLPerf Training that are trained on and evaluated.
_TRAIN, _VAL = 94_600_000 / 269_346_174, 788_379 / 269_346_174


def synthetic_igbh(
    scale: float = 1 / 1024,
    *,
    num_features: int = 1024,
    num_classes: int = 2983,
    seed: int = 0,
    device: str | int | torch.device | None = "cpu",
    homophily: float = 0.5,
    feature_signal: float = 4.0,
    dtype: torch.dtype = torch.float16,
    topology_only: bool = False,
) -> HeteroData:
    """Draw a graph shaped like IGBH-Full, `scale` times its size: 547 million nodes of six types, 5.8 billion edges.

    Papers cite papers, and have authors, topics, journals and conferences; authors have institutes. All relations but
    citations are there in both directions. Journals and conferences are as frequent as in the Microsoft Academic Graph.
    Everything follows from `seed`: equal arguments on one device type give equal graphs.

    Args:
        scale: Factor on nodes and edges, above 0.
        num_features: F, of every type.
        num_classes: Number of classes of papers.
        seed: Any integer of at least 0.
        device: The device that draws and holds the graph; None is the current GPU, or the CPU if there is no GPU.
        homophily: Probability in [0, 1] that an edge is drawn inside a class.
        feature_signal: Distance of a class's centroid from the origin, in standard deviations of the noise.
        dtype: Dtype of the features.
        topology_only: Leave `x` of every type out; `fill_features` can write it in other memory.

    Returns:
        `x` `[N, F]` of every type, `edge_index` int64 `[2, E]` of 11 relations, and of papers `y` int64 `[N]`,
        `train_idx` and `val_idx` int64.

    Raises:
        ArgumentTypeError: An argument has the wrong type.
        ArgumentError: An argument lies outside its rule.
        DeviceError: `device` is a GPU that this machine lacks.

    Example:
        >>> data = synthetic_igbh(1e-6, num_features=4, num_classes=3)
        >>> data["paper"].x.shape, len(data.edge_types)
        (torch.Size([269, 4]), 11)
    """
    scale = check_positive("scale", scale)
    num_features = check_int("num_features", num_features, least=1)
    num_classes = check_int("num_classes", num_classes, least=1)
    seed = check_int("seed", seed, least=0)
    homophily = check_fraction("homophily", homophily)
    feature_signal = check_not_negative("feature_signal", feature_signal)
    device, dtype = check_device("device", device), check_float_dtype("dtype", dtype)
    data, slots = HeteroData(), {}
    for number, (kind, size) in enumerate(NODES.items()):
        count = max(1, int(size * scale))
        *slots[kind], y = draw_classes(count, num_classes, make_generator(seed, f"classes of {kind}", device))
        data[kind].num_nodes = count
        if kind == "paper":
            split = draw_split(count, (_TRAIN, _VAL, 0.0), make_generator(seed, "split", device))
            data[kind].y, data[kind].train_idx, data[kind].val_idx = y, split[0], split[1]
        if not topology_only:
            x = use_large_pages(torch.empty(count, num_features, dtype=dtype, device=device))
            # Types have centroids and noise of their own.
            data[kind].x = fill_features(x, y, seed=len(NODES) * seed + number, num_classes=num_classes,
                                         feature_signal=feature_signal)  # fmt: skip
    for relation in RELATIONS:
        source, name, target = relation[:3]
        edges = _draw_edges(relation, max(1, int(relation.num_edges * scale)), slots[source], slots[target], homophily,
                            make_generator(seed, f"edges of {name}", device))  # fmt: skip
        data[source, name, target].edge_index = edges
        if relation.is_reversed:
            data[target, f"rev_{name}", source].edge_index = edges.flip(0)
    return data


def _draw_edges(relation: Relation, num_edges: int, sources: list[Tensor], targets: list[Tensor], homophily: float,
                generator: torch.Generator) -> Tensor:  # fmt: skip
    """Draw the edges of a relation, int64 `[2, E]`, chunk by chunk.

    Args:
        sources, targets: First slot of every class, then N, float64 `[C + 1]`; node of every slot, int64 `[N]`.
    """
    (starts, nodes), (target_starts, target_nodes) = sources, targets
    singles = None
    if relation.source_hub == 0:
        singles = torch.randperm(len(nodes), generator=generator, device=nodes.device)
        num_edges = min(num_edges, len(nodes))
    out = use_large_pages(torch.empty(2, num_edges, dtype=torch.int64, device=nodes.device))
    chunk = CHUNK_EDGES["cpu" if nodes.device.type == "cpu" else "cuda"]
    for begin in range(0, num_edges, chunk):
        end = min(begin + chunk, num_edges)
        position, other, stay = torch.rand(3, end - begin, dtype=torch.float64, generator=generator,
                                           device=nodes.device)  # fmt: skip
        if singles is None:
            position.mul_(len(nodes))
            number = torch.bucketize(position, starts[1:-1], right=True)
            slot = skew_position(position, starts[number], starts[number + 1], relation.source_hub)
        else:
            slot = singles[begin:end]
            number = torch.bucketize(slot.double(), starts[1:-1], right=True)
        first, last = target_starts[number], target_starts[number + 1]
        # A class may have no node of a small type.
        place = torch.where((stay < homophily) & (first < last), first + other * (last - first),
                            other * len(target_nodes))  # fmt: skip
        number = torch.bucketize(place, target_starts[1:-1], right=True)
        target = skew_position(place, target_starts[number], target_starts[number + 1], relation.target_hub)
        out[0, begin:end], out[1, begin:end] = nodes[slot], target_nodes[target]
    return out
