"""Batches of graphs behind PyG's `FeatureStore` and `GraphStore`, in each layout, around nodes and links."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import torch
from torch_geometric.data import Data
from torch_geometric.testing import MyFeatureStore, MyGraphStore

from pyg_direct import FeatureStore
from tests.fuzz import links, neighbors
from tests.fuzz.space import Row, Space
from tests.fuzz.ways import CACHES, STORED, loading_options
from tests.reference.compress import compress

# Options of the loaders that stores leave at their defaults, or that say the same here.
FIXED = {"weight": "no", "direction": "forward", "hotness": "expected", "presample": "none",
         "super_batch": "1", "topology": "same", "topology_cache": "none", "input_id": "none", "cache": "none",
         "store": "none", "threads": "one", "hook": "none", "exclude": "no", "labels": "no", "strict": "no",
         "amount": "one", "end_weights": "none"}  # fmt: skip
# Seeds as links are given.
LINKS_AS = {"all": "all", "ids": "some", "repeated": "repeated", "empty": "nobody"}


def space(device: str) -> Space:
    """The options of this subject."""
    options = {
        **neighbors.sampling_options(), **loading_options(device),
        "via": ("NeighborLoader", "NodeLoader", "SubGraphLoader", "LinkNeighborLoader", "LinkLoader"),
        "layout": ("coo", "csr", "csc", "both"), "rows": ("pyg", "own"), "store": tuple(STORED), "cache": tuple(CACHES),
        "seeds": tuple(LINKS_AS), "input_time": ("own", "given"), "negatives": ("none", "binary", "triplet"),
        "ranks": ("none", "first"), "threads": ("one", "all"), "hook": ("none", "output", "batch"),
    }  # fmt: skip
    del options["weight"]
    rules = (
        *(rule for rule in neighbors.SAMPLING_RULES if "weight" not in rule[0]),
        # As in PyG: seeds must be told where there are no types.
        (("graph", "via", "seeds"), lambda graph, via, seeds: graph == "hetero" or "Link" in via or seeds != "all"),
        (("via", "subgraph"), lambda via, kind: via != "SubGraphLoader" or kind == "induced"),
        (("via", "negatives"), lambda via, negatives: "Link" in via or negatives == "none"),
        (("via", "input_time"), lambda via, given: "Link" not in via or given == "own"),
        (("via", "window", "input_time"), lambda via, window, given: "Link" in via or window != neighbors.OWN_WINDOWS
         or given == "given"),
        (("via", "time", "input_time"), lambda via, time, given: "Link" in via
         or given == {"none": "own", "edge": "given"}.get(time, given)),
        (("via", "leave"), lambda via, leave: "Link" not in via or leave != "call"),
        (("ranks", "leave"), lambda ranks, leave: ranks == "none" or leave != "resume"),
        # Times are in order along the lists that a store keeps; sorted anew by targets they are not.
        (("layout", "sorted"), lambda layout, ordered: layout != "csr" or ordered == "no"),
        # Links of a relation come in the order of the layout that PyG takes them from, which may be another one.
        (("via", "layout", "seeds"), lambda via, layout, seeds: "Link" not in via or layout != "both"
         or seeds != "all"),
        (("rows", "store"), lambda rows, store: rows == "own" or store == "none"),
        (("rows", "cache"), lambda rows, cache: rows == "own" or cache == "none"),
    )  # fmt: skip
    return Space(options, rules)


def hold(row: Row, random: Random, device: str, data: Any) -> tuple[Any, Any]:
    """The stores of a graph; types that nothing would name get rows, and rows of edges integers, in `data` too."""
    features: Any = MyFeatureStore()
    if row["rows"] == "own":
        features = FeatureStore(device, device_cache_size=CACHES[row["cache"]] or 0, store_dtype=STORED[row["store"]])
    graph = MyGraphStore()
    if isinstance(data, Data):
        data.edge_attr = (data.edge_attr * 4).long()
        groups, relations = [(None, data)], [(None, data, (data.num_nodes, data.num_nodes))]
    else:
        for kind in data.node_types:
            if "x" not in data[kind]:
                data[kind].x = torch.arange(data[kind].num_nodes)
        groups = [*data.node_items(), *data.edge_items()]
        relations = [(kind, part, (data[kind[0]].num_nodes, data[kind[2]].num_nodes))
                     for kind, part in data.edge_items()]  # fmt: skip
    for group, part in groups:
        for name, value in part.items():
            if name not in ("edge_index", "num_nodes"):
                features.put_tensor(value, group_name=group, attr_name=name, index=None)
    for kind, part, size in relations:
        put_edges(graph, kind, part.edge_index, size, row["layout"], random)
    return features, graph


def put_edges(graph: Any, kind: Any, edge_index: torch.Tensor, size: tuple[int, int], layout: str, random: Random
              ) -> None:  # fmt: skip
    """Put edges, in the order of the layout already, into a store; with `both` in another order too."""
    put = partial(graph.put_edge_index, edge_type=kind, size=size)
    source, target = edge_index
    if layout == "coo":
        put((source, target), layout="coo")
    if layout == "both":
        order = torch.tensor(random.sample(range(len(source)), len(source)), dtype=torch.int64)
        put((source[order], target[order]), layout="coo")
    if layout == "csr":
        put((pointers(source, size[0]), target), layout="csr")
    if layout in ("csc", "both"):
        put((source, pointers(target, size[1])), layout="csc")


def pointers(ends: torch.Tensor, count: int) -> torch.Tensor:
    """Where the edges of each node begin, of their ends ascending."""
    return torch.tensor(compress(ends.tolist(), ends.tolist(), count)[0], dtype=ends.dtype)


def run(row: Row, random: Random, device: str) -> int:
    """Check the batches of a loader."""
    whole = {**FIXED, **row, "cache": "none", "store": "none", "links": LINKS_AS[row["seeds"]]}
    subject: Any = links if "Link" in row["via"] else neighbors
    count: int = subject.run(whole, random, device, hold=partial(hold, row, random, device))
    return count
