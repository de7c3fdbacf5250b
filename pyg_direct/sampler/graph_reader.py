"""Graph input of a sampler: sizes, edges, times and weights of `Data`, `HeteroData` or a pair of stores.

The aliases are the types of arguments that samplers and loaders share. PyG's classes stand there by name: checkers that
read PyG's source find wrong graphs and batches.

`read_stores` reads PyG's stores (`FeatureStore`, `GraphStore`): relations, edges, tables and times. `tell_count` adds
the source of the number of nodes to errors about ids outside it.
"""

from __future__ import annotations

import copy
import os
import re
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torch_geometric.data import Data, FeatureStore, GraphStore, HeteroData, TensorAttr, remote_backend_utils
from torch_geometric.data.graph_store import EdgeLayout
from torch_geometric.sampler import NegativeSampling, NumNeighbors
from torch_geometric.sampler.base import SubgraphType
from torch_geometric.typing import SparseTensor

from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError
from pyg_direct.features.feature import Feature
from pyg_direct.features.feature_store import FeatureStore as OwnStore
from pyg_direct.graph.csr_topo import CSRTopo, FiledLists
from pyg_direct.graph.hetero_topo import EdgeType, HeteroTopo
from pyg_direct.graph.pyg_edges import as_rows, check_adjacency, derive, find_edges
from pyg_direct.ops.compute_content_hash import Content, has_content, read_content
from pyg_direct.progress import announce
from pyg_direct.runtime.cuda.device import free_bytes
from pyg_direct.runtime.host.tensor_views import version_of
from pyg_direct.sampler.graph_store import GraphStore as OwnGraphStore
from pyg_direct.sampling.negative_links import Edges, EdgeSet

# A graph in tensors, or in stores, of which the second may be None beside a sampler that has the edges.
Graph: TypeAlias = Data | HeteroData | tuple[FeatureStore, GraphStore | None]
# Fanouts of each hop, or these for each relation.
FanoutsOf: TypeAlias = Sequence[int] | Mapping[EdgeType, Sequence[int]] | NumNeighbors
# Ids of nodes, or a mask.
Ids: TypeAlias = Tensor | np.ndarray | Sequence[int]
# Seeds; with types, a type or (type, seeds).
InputNodes: TypeAlias = Ids | str | tuple[str, Ids | None] | None
# Links; with types, a relation or (relation, links).
InputLinks: TypeAlias = Tensor | EdgeType | tuple[EdgeType, Tensor | None] | None
Subgraph: TypeAlias = str | SubgraphType
Negatives: TypeAlias = NegativeSampling | str | Mapping[str, Any] | None


# Of several layouts of a relation, the one that needs no sorting comes first.
_PREFERENCE = (EdgeLayout.CSC, EdgeLayout.COO, EdgeLayout.CSR)


def read_stores(features: FeatureStore, graph: GraphStore, time_attr: str | None) -> tuple[Any, Any, Any, Any]:
    """Read (number of nodes, edges, times of nodes, times of edges) of a graph in stores.

    Edge ids are positions in the layout that the store keeps.
    """
    best: dict[Any, Any] = {}
    for attr in graph.get_all_edge_attrs():
        known = best.get(attr.edge_type)
        if known is None or _PREFERENCE.index(attr.layout) < _PREFERENCE.index(known.layout):
            best[attr.edge_type] = attr
    edges = {edge_type: _read_layout(graph, attr) for edge_type, attr in best.items()}
    if list(edges) == [None]:
        size = best[None].size
        if size is None or None in size:
            raise ArgumentError(
                "edges in the graph store must have a size, size=(num_nodes, num_nodes), as nothing else tells the "
                f"number of nodes, got {size}"
            )
        num_nodes: Any = max(size)
        _check_tables(features, {None: num_nodes}, edges)
        node_time, edge_time = _read_times(features, time_attr, num_nodes, edges)
        return num_nodes, edges[None], node_time, edge_time
    names = [attr.group_name for attr in features.get_all_tensor_attrs() if isinstance(attr.group_name, str)]
    names += [edge_type[end] for edge_type in edges for end in (0, 2)]
    num_nodes = {name: int(remote_backend_utils.num_nodes(features, graph, name)) for name in dict.fromkeys(names)}
    _check_tables(features, num_nodes, edges)
    node_time, edge_time = _read_times(features, time_attr, num_nodes, edges)
    return num_nodes, edges, node_time, edge_time


def list_relations(graph: GraphStore | None) -> list[Any]:
    """List the relations with edges in a store; [None] without types or without a store."""
    if graph is None:
        return [None]
    return list(dict.fromkeys(attr.edge_type for attr in graph.get_all_edge_attrs()))


def list_links(graph: GraphStore | None, edge_type: Any) -> Tensor:
    """List the edges of a relation in the order of the store, `[2, E]`; `edge_type` is None without types."""
    if graph is None:
        raise ArgumentError(
            f"edge_label_index must have the links where data has no GraphStore to list them, got {edge_type}"
        )
    edge_type, known = None if edge_type is None else tuple(edge_type), list_relations(graph)
    if edge_type not in known:
        raise ArgumentError(f"edge_label_index must name a known relation, got {edge_type} of {known}")
    rows, cols, _ = graph.coo([edge_type])
    return torch.stack([rows, cols] if edge_type is None else [rows[edge_type], cols[edge_type]])


def _read_layout(graph: GraphStore, attr: Any) -> Any:
    if isinstance(graph, OwnGraphStore):
        # With its edge ids, and lists that stay in files.
        return graph.topology
    first, second = graph.get_edge_index(attr)
    if attr.layout == EdgeLayout.COO:
        whole = first._base
        is_list = whole is not None and whole is second._base and type(whole) is Tensor and whole.dim() == 2
        if is_list and all(part.data_ptr() == row.data_ptr() and part.shape == row.shape and part.dtype == row.dtype
                           and part.stride() == row.stride()
                           for part, row in zip((first, second), whole, strict=False)) and len(whole) == 2:  # fmt: skip
            # The store's own tensor, so that later writes to it are seen.
            return whole
        return torch.stack([first, second])
    if attr.layout == EdgeLayout.CSC:
        return {"indptr": second, "indices": first, "direction": "in"}
    return {"indptr": first, "indices": second, "direction": "out"}


def count_edges(edges: Any) -> int:
    """Count the edges of a relation in the form of `read_stores`."""
    if isinstance(edges, CSRTopo):
        return edges.edge_count
    return int(edges["indices"].numel() if isinstance(edges, dict) else edges.shape[1])


def _check_tables(features: FeatureStore, num_nodes: dict[Any, int], edges: dict[Any, Any]) -> None:
    """Refuse tables of our `FeatureStore` with fewer rows than nodes or edges; others may store rows differently."""
    if not isinstance(features, OwnStore):
        return
    for attr in features.get_all_tensor_attrs():
        kind, what, num_rows = attr.group_name, "nodes", features.find(attr).shape[0]
        needed = num_nodes.get(kind) if kind is None or isinstance(kind, str) else None
        if kind is None and is_edge_attr(attr, num_rows, num_nodes[None], count_edges(edges[None])):
            what, needed = "edges", count_edges(edges[None])
        elif needed is None and kind in edges:
            what, needed = "edges", count_edges(edges[kind])
        if needed is not None and num_rows < needed:
            table = f"{attr.attr_name!r}" if kind is None else f"{attr.attr_name!r} of {kind!r}"
            raise ArgumentError(
                f"the table {table} in the feature store must have a row for each of the {needed} {what} of the graph "
                f"store, got {num_rows}: put one with more rows, or edges of a smaller size"
            )


def _read_times(features: FeatureStore, time_attr: str | None, num_nodes: Any, edges: dict[Any, Any]
                ) -> tuple[Any, Any]:  # fmt: skip
    if time_attr is None:
        return None, None
    found = [copy.copy(attr) for attr in features.get_all_tensor_attrs() if attr.attr_name == time_attr]
    if not found:
        raise ArgumentError(f"time_attr must name an attribute of the feature store, got {time_attr!r}")
    for attr in found:
        attr.index = None
    values = features.multi_get_tensor(found)
    if list(edges) == [None]:
        is_edge = is_edge_attr(found[0], len(values[0]), num_nodes, count_edges(edges[None]))
        return (None, values[0]) if is_edge else (values[0], None)
    node_time = {a.group_name: v for a, v in zip(found, values, strict=True) if isinstance(a.group_name, str)}
    edge_time = {tuple(a.group_name): v for a, v in zip(found, values, strict=True)
                 if not isinstance(a.group_name, str)}  # fmt: skip
    if node_time and edge_time:
        raise ArgumentError(f"time_attr must name times of nodes or of edges, {time_attr!r} names both")
    return node_time or None, edge_time or None


def is_edge_attr(attr: TensorAttr, num_rows: int, num_nodes: int, num_edges: int) -> bool:
    """Check if an attribute of a graph without types belongs to edges.

    This depends on its number of rows, or on its name if nodes and edges are equally many.
    """
    if num_nodes == num_edges:
        return "edge" in str(attr.attr_name)
    return num_rows == num_edges


# Attributes whose rows PyG counts if `num_nodes` is not set, in the order of the attributes.
_KEYS = ("x", "feat", "pos", "batch", "node_type", "n_id", "tf")


def tell_count(message: str, data: Any) -> str:
    """Add to a message about ids not below `num_nodes` the attribute that gave this number.

    Args:
        message: It names the number as `(num_nodes)`, or with the type as `(num_nodes['paper'])`.
        data: The graph; with other classes than PyG's `Data` and `HeteroData` the message is unchanged.
    """
    if ", got -" in message:
        return message
    if isinstance(data, Data) and "(num_nodes)" in message:
        return f"{message}: {_tell_store(data._store, 'data')}"
    for kind in data.node_types if isinstance(data, HeteroData) else ():
        if f"(num_nodes[{kind!r}])" in message:
            return f"{message}: {_tell_store(data[kind], f'data[{kind!r}]')}"
    return message


def _tell_store(store: Any, name: str) -> str:
    if "num_nodes" in store:
        return f"{name}.num_nodes was set to {store['num_nodes']}; edges may only name nodes below it"
    keys = [key for key, value in store.items() if hasattr(value, "shape") or key == "tf"]
    told = [key for key in keys if key in _KEYS] or [key for key in keys if "node" in key]
    if told:
        rows = f"{name}.{told[0]}"
        return f"{name}.num_nodes is not set, so the rows of {rows} tell it; give {rows} a row for each node"
    return f"{name}.num_nodes is not set; set it"


_TOPOLOGIES: dict[tuple[Any, ...], tuple[list[weakref.ref[Any]], weakref.ref[HeteroTopo], list[Content]]] = {}


@dataclass(eq=False)
class Parts:
    """Parts of a graph: by node type and relation, or bare for a homogeneous graph.

    Attributes:
        edges: Edge lists, sparse tensors, or (indptr, indices, edge ids) that a store keeps by row.
        node_time, edge_time: Times, at most one of both.
        names: Names of times and weights in the user's graph, by their names here.
    """

    num_nodes: int | dict[str, int]
    edges: Any
    node_time: Any = None
    edge_time: Any = None
    edge_weight: Any = None
    names: dict[str, str] = field(default_factory=dict)
    data: Any = None

    @cached_property
    def is_hetero(self) -> bool:
        """True if the graph has types."""
        return isinstance(self.num_nodes, dict)

    @cached_property
    def is_temporal(self) -> bool:
        """True if nodes or edges have times."""
        return self.node_time is not None or self.edge_time is not None

    @property
    def lists(self) -> FiledLists | None:
        """Neighbor lists that stay in files; None for lists in memory."""
        return self.edges.lists if isinstance(self.edges, CSRTopo) else None

    def open(self, direction: str, is_sorted: bool) -> HeteroTopo:
        """Open the topology; samplers over the same tensors share one.

        Args:
            direction: `in` or `out`.
            is_sorted: See `HeteroTopo`.
        """
        parts = (self.num_nodes, self.edges, self.node_time, self.edge_time, self.edge_weight)
        sources: list[Any] = []
        key = (*(_note(part, sources) for part in parts), direction, is_sorted)
        known = _TOPOLOGIES.get(key)
        # A strong reference: the last owner may drop the topology meanwhile.
        topology = None if known is None else known[1]()
        if known is not None and topology is not None:
            alive = [ref() for ref in known[0]]
            if all(a is b for a, b in zip(alive, sources, strict=True)) and all(map(has_content, sources, known[2])):
                return topology
        contents = list(map(read_content, sources))
        if self.is_hetero:
            edges: Any = {name: _read_edges(value, direction) for name, value in self.edges.items()}
        else:
            edges = _read_edges(self.edges, direction)
        try:
            topology = HeteroTopo(self.num_nodes, edges, node_time=self.node_time, edge_time=self.edge_time,
                                  edge_weight=self.edge_weight, direction=direction, is_sorted=is_sorted)  # fmt: skip
        except (ArgumentError, ArgumentTypeError) as error:
            raise type(error)(tell_count(_rename(str(error), self.names), self.data)) from error
        gone = [k for k, (refs, made, _) in _TOPOLOGIES.items() if made() is None or any(r() is None for r in refs)]
        for old in gone:
            del _TOPOLOGIES[old]
        _TOPOLOGIES[key] = [weakref.ref(source) for source in sources], weakref.ref(topology), contents
        return topology

    def edge_set(self, edge_type: EdgeType | None, num_sources: int, num_targets: int, device: torch.device) -> Edges:
        """Build the set of edges to avoid, on a device: of a relation, or of all edges for None."""
        edges = _read_edges(self.edges if edge_type is None else self.edges[edge_type], "coo")
        return EdgeSet(edges[0].to(device), edges[1].to(device), num_sources, num_targets)

    def is_reverse(self, edge_type: EdgeType, other: EdgeType) -> bool | None:
        """Compare the edges of a relation with the reversed edges of another; None if the edges are not known."""
        num_sources, num_targets = self.num_nodes[edge_type[0]], self.num_nodes[edge_type[-1]]  # type: ignore[index]
        if edge_type not in self.edges or num_sources * num_targets >= 2**63:
            return False
        ends = _read_edges(self.edges[edge_type], "coo"), _read_edges(self.edges[other], "coo").flip(0)
        first, second = ((pairs[0].cpu().long() * num_targets + pairs[1].cpu().long()).unique() for pairs in ends)
        return torch.equal(first, second)


def _rename(message: str, names: Mapping[str, str]) -> str:
    """Replace `name['paper']` at the start of a message by the user's name for it, of 'paper'."""
    name, kind, rest = re.fullmatch(r"(\w*)(?:\[(.*?)\])?(.*)", message, re.DOTALL).groups()  # type: ignore[union-attr]
    return message if name not in names else names[name] + (f" of {kind}" if kind else "") + rest


def _note(part: Any, sources: list[Any]) -> Any:
    """Make a key that identifies a part, and add its tensors to `sources`."""
    if isinstance(part, dict):
        return tuple((name, _note(value, sources)) for name, value in part.items())
    if isinstance(part, tuple):
        return tuple(_note(value, sources) for value in part)
    if part is None or isinstance(part, (int, str)):
        return part
    sources.append(part)
    return id(part), version_of(part)


def find_places(store: Any, name: str) -> Tensor | None:
    """Find the positions in `edge_index` of the edges of `adj_t`, int64 `[E]`.

    Edge ids follow `adj_t`, attributes follow `edge_index`. None if both have the same order, or only one is given.
    """
    adj_t, edge_index = store.get("adj_t"), store.get("edge_index")
    if adj_t is None or edge_index is None:
        return None
    places: Tensor | None = derive("places", _match_edges, as_rows(adj_t), edge_index)
    if places is not None and bool((places < 0).any()):
        source, target = _read_edges(as_rows(adj_t), "coo")[:, int((places < 0).nonzero()[0])].tolist()
        raise ArgumentError(
            f"{name}.edge_index must hold every edge of {name}.adj_t, which is sampled, as attributes "
            f"of edges go by edge_index, got none from {source} to {target}: delete one of both"
        )
    return places


def _match_edges(adj_t: Any, edge_index: Tensor) -> Tensor | None:
    """Match edges as `find_places` does; -1 for a missing edge. Parallel edges are matched in order."""
    own, given = _read_edges(adj_t, "coo").long(), _read_edges(edge_index, "coo").long()
    own = own.to(given.device)
    if own.shape == given.shape and torch.equal(own, given):
        return None
    size = int(torch.cat([own[1], given[1]]).max()) + 1 if own.numel() + given.numel() else 1
    wanted, order = (own[0] * size + own[1]).sort(stable=True)
    known, places = (given[0] * size + given[1]).sort(stable=True)
    # The number of each edge among its parallel edges.
    turns = torch.arange(len(wanted), device=wanted.device) - torch.searchsorted(wanted, wanted)
    at = torch.searchsorted(known, wanted) + turns
    found = torch.full_like(order, -1)
    is_there = at < len(known)
    is_there[is_there.clone()] = known[at[is_there]] == wanted[is_there]
    found[order[is_there]] = places[at[is_there]]
    return found


def place_rows(store: Any, name: str, device: torch.device) -> Tensor | None:
    """Find the positions as `find_places` does, on a device; None if there are no attributes of edges."""
    if "adj_t" not in store or not any(store.is_edge_attr(key) for key in store if key not in ("edge_index", "adj_t")):
        return None
    places = find_places(store, name)
    return None if places is None else derive(f"places on {device}", partial(Tensor.to, device=device), places)


def place_values(store: Any, name: str, values: Tensor) -> Tensor:
    """Reorder values of edges from the order of `edge_index` to the order of edge ids; unchanged if both are equal."""
    places = find_places(store, name) if isinstance(values, Tensor) else None
    return values if places is None else derive("values", _take, values, places)


def _take(values: Tensor, places: Tensor) -> Tensor:
    return values.index_select(0, places.to(values.device))


def check_graph(data: Any, is_sampled: bool = True) -> None:
    """Refuse graphs of classes that loaders do not support.

    Args:
        is_sampled: True if its edges are read; a sampler with its own edges needs no `GraphStore` beside the features.
    """
    if isinstance(data, (Data, HeteroData)):
        refuse_features(data)
        return
    if isinstance(data, (tuple, list)) and len(data) == 2 and isinstance(data[0], FeatureStore):
        is_graph = isinstance(data[1], GraphStore) or (data[1] is None and not is_sampled)
        if is_graph and not _is_several(data):
            return
    raise ArgumentTypeError(f"data must be a Data, a HeteroData or a tuple of FeatureStore and GraphStore, got "
                            f"{describe_other(data)}")  # fmt: skip


def _is_several(data: Any) -> bool:
    """Check for several graphs, each with edges of its own; a `Data` is a store of rows and a store of edges, too."""
    if isinstance(data, Dataset):
        return True
    graphs = data[:2] if isinstance(data, (tuple, list)) else []
    if len(graphs) == 0 or not all(isinstance(graph, (Data, HeteroData)) for graph in graphs):
        return False
    is_pair = len(data) == 2 and (isinstance(data, tuple) or data[0] is data[1])
    return not is_pair or (data[0] is not data[1] and any("edge_index" in store for store in data[0].edge_stores))


def describe_other(data: Any) -> str:
    """Describe an object given in place of a graph, and how it becomes one, to end an error message."""
    found = type(data).__name__
    if isinstance(data, (tuple, list)):
        found += f" of {len(data)}"
        names = [type(part).__name__ for part in data]
        if len(data) == 2 and not isinstance(data[0], FeatureStore):
            found += f", whose first is a {names[0]} and no FeatureStore"
        elif len(data) == 2 and not isinstance(data[1], GraphStore):
            found += f", whose second is a {names[1]} and no GraphStore, as Data(edge_index=..., num_nodes=...) is one"
    return found + _advise(data)


def _advise(data: Any) -> str:
    if _is_several(data) and len(data):
        return ": give one of its graphs, such as data[0]; for batches of many small graphs take DataLoader"
    # A room above this one.
    if any(kind.__module__.startswith("pyg_direct.distributed.") for kind in type(data).__mro__):
        return ": a graph in parts is for DistNeighborLoader and its kin in pyg_direct.distributed"
    if callable(getattr(data, "to_data", None)):
        return ": give its to_data()"
    if isinstance(data, FeatureStore):
        return ": give (store, Data(edge_index=..., num_nodes=...))"
    if isinstance(data, (Tensor, np.ndarray)):
        return ": give Data(edge_index=..., num_nodes=...)"
    return ": load the graph first" if isinstance(data, (str, os.PathLike)) else ""


def refuse_features(data: Any) -> None:
    """Refuse a `Feature` among the attributes of a `Data` or `HeteroData`: each batch would hold all of its rows."""
    for store in data.stores:
        kind = store._key
        for name, value in store.items():
            if isinstance(value, Feature):
                owner, graph = ("data", "Data") if kind is None else (f"data[{kind!r}]", "HeteroData")
                raise ArgumentTypeError(
                    f"{owner}.{name} must be a tensor, got a Feature: put it in a store, store = pyg_direct."
                    f"FeatureStore(); store[{kind!r}, {name!r}, None] = feature, and give (store, {graph}(...)) with "
                    "edge_index and num_nodes alone"
                )


def read_parts(data: Any, time_attr: str | None = None, weight_attr: str | None = None) -> Parts:
    """Read the parts of a graph that sampling needs."""
    check_graph(data)
    for name, attr in (("time_attr", time_attr), ("weight_attr", weight_attr)):
        if attr is not None and not isinstance(attr, str):
            raise ArgumentTypeError(f"{name} must be the name of an attribute, got {attr!r}")
    parts = _read_parts(data, time_attr, weight_attr)
    times = f"time_attr={time_attr!r}"
    parts.data = data
    parts.names = {"node_time": times, "edge_time": times, "edge_weight": f"weight_attr={weight_attr!r}",
                   "edges": "edge_index"}  # fmt: skip
    return parts


def _read_parts(data: Any, time_attr: str | None, weight_attr: str | None) -> Parts:
    if isinstance(data, Data):
        return _read_data(data, time_attr, weight_attr)
    if isinstance(data, HeteroData):
        return _read_hetero(data, time_attr, weight_attr)
    if weight_attr is not None:
        raise NotImplementedError(f"weight_attr={weight_attr!r} with (FeatureStore, GraphStore), as in PyG")
    assert isinstance(data[0], FeatureStore)
    return Parts(*read_stores(data[0], data[1], time_attr))


def count_nodes(data: Data) -> int:
    """Count the nodes of a `Data`."""
    if data.num_nodes is None:
        raise ArgumentError("data must know its number of nodes; set data.num_nodes")
    return int(data.num_nodes)


def _read_data(data: Data, time_attr: str | None, weight_attr: str | None) -> Parts:
    edges = find_edges(data)
    parts = Parts(count_nodes(data), torch.empty(2, 0, dtype=torch.int64, device="cpu") if edges is None else edges)
    for name, attr in (("time_attr", time_attr), ("weight_attr", weight_attr)):
        if attr is not None and attr not in data:
            raise ArgumentError(f"{name} must name an attribute of data, got {attr!r}")
    if time_attr is not None:
        if data.is_node_attr(time_attr):
            parts.node_time = data[time_attr]
        elif data.is_edge_attr(time_attr):
            parts.edge_time = place_values(data._store, "data", data[time_attr])
        else:
            raise ArgumentError(f"time_attr must name times of nodes or edges, {time_attr!r} is neither")
    if weight_attr is not None:
        parts.edge_weight = place_values(data._store, "data", data[weight_attr])
    return parts


def _read_hetero(data: HeteroData, time_attr: str | None, weight_attr: str | None) -> Parts:
    edges = {}
    for edge_type, store in data.edge_items():
        if "edge_index" in store or "adj_t" in store:
            edges[edge_type] = find_edges(store)
    num_nodes = {kind: int(_count_met(kind, edges) if store.num_nodes is None else store.num_nodes)
                 for kind, store in data.node_items()}  # fmt: skip
    parts = Parts(num_nodes, edges)
    if time_attr is not None:
        node_time = {kind: store[time_attr] for kind, store in data.node_items() if time_attr in store}
        edge_time = {kind: place_values(data[kind], f"data[{kind}]", data[kind][time_attr])
                     for kind in edges if time_attr in data[kind]}  # fmt: skip
        if node_time and edge_time:
            raise ArgumentError(f"time_attr must name times of nodes or of edges, {time_attr!r} names both")
        if not node_time and not edge_time:
            known = sorted({name for store in data.stores for name in store if name != "edge_index"})
            raise ArgumentError(f"time_attr must name an attribute of nodes or edges, got {time_attr!r} of {known}")
        untimed = [kind for kind in edges if edge_time and kind not in edge_time]
        if untimed:
            named = ", ".join(map(str, untimed))
            announce(f"time_attr={time_attr!r}: {named} without it; all of these edges are sampled")
        parts.node_time, parts.edge_time = node_time or None, edge_time or None
    if weight_attr is not None:
        parts.edge_weight = {kind: place_values(data[kind], f"data[{kind}]", data[kind][weight_attr])
                             for kind in edges if weight_attr in data[kind]}  # fmt: skip
        if not parts.edge_weight:
            raise ArgumentError(f"weight_attr must name an attribute of edges, got {weight_attr!r}")
    return parts


def _count_met(kind: str, edges: Mapping[EdgeType, Any]) -> int:
    """Count nodes of a type without `num_nodes` by the ids in its edges, as PyG does."""
    counts = [0]
    for edge_type, value in edges.items():
        for end in (0, 2):
            if edge_type[end] != kind:
                continue
            if not isinstance(value, Tensor) or value.layout != torch.strided:
                sizes = value.sparse_sizes() if isinstance(value, SparseTensor) else value.shape
                counts.append(int(sizes[1 - end // 2]))
            elif value.numel():
                counts.append(int(value[end // 2].max()) + 1)
    return max(counts)


def _read_edges(edges: Any, form: str) -> Any:
    """Read an edge list `[2, E]`, sources first; for `in` and `out`, rows of a store as such are not expanded."""
    if isinstance(edges, CSRTopo):
        if form == (edges.listed or "in"):
            return edges
        if edges.lists is not None:
            raise ArgumentError(f"neighbor lists in a file ({edges.lists.indices.file.path}) can only be read list by "
                                "list: this option needs all edges in memory")  # fmt: skip
        rows = {"indptr": edges.indptr, "indices": edges.indices, "direction": edges.listed or "in"}
        ends = _read_edges(rows, "coo")
        if edges.eid is None:
            return ends
        # Positions in the list are the ids.
        order = edges.eid.argsort()
        if not torch.equal(edges.eid[order].long(), torch.arange(len(order), device=order.device)):
            raise ArgumentError(
                "eid of a CSRTopo must hold each of 0 to E - 1 once where edges are not read row by row"
            )
        return ends[:, order]
    if isinstance(edges, Mapping):
        # Compressed rows or columns of a store, and their direction.
        indptr, indices = edges["indptr"], edges["indices"]
        if form == edges["direction"]:
            return indptr.long(), indices, None
        expanded = torch.arange(indptr.numel() - 1, device=indptr.device).repeat_interleave(indptr.long().diff())
        ends = (indices, expanded) if edges["direction"] == "in" else (expanded, indices)
        return torch.stack([ends[0].to(expanded.dtype), ends[1].to(expanded.dtype)])
    if isinstance(edges, SparseTensor):
        indptr, indices, _ = edges.csr()
        return _read_edges({"indptr": indptr, "indices": indices, "direction": "in"}, form)
    if isinstance(edges, Tensor) and edges.layout == torch.sparse_csr:
        rows = {"indptr": edges.crow_indices(), "indices": edges.col_indices(), "direction": "in"}
        return _read_edges(rows, form)
    if isinstance(edges, Tensor) and edges.layout == torch.strided:
        return edges.as_tensor() if hasattr(edges, "as_tensor") and hasattr(edges, "sparse_size") else edges
    check_adjacency(edges, "adj_t")
    raise ArgumentTypeError(
        f"edge_index must be a tensor [2, E], a SparseTensor or a sparse CSR tensor, got {type(edges).__name__}"
    )


def settle_filter(filter_per_worker: bool | None, data: Any) -> bool:
    """Replace None by PyG's default: True unless the graph lies on a GPU, without PyG's warning."""
    if filter_per_worker is None:
        return not (isinstance(data, Data | HeteroData) and data.is_cuda)
    return filter_per_worker


_COMPRESSED: dict[tuple[Any, ...], tuple[weakref.ref[Any], weakref.ref[CSRTopo], Content]] = {}


# Peak memory of compressing edges on the GPU, about this many bytes an edge.
_COMPRESS_BYTES = 64


def read_topology(data: Data, device: torch.device) -> CSRTopo:
    """Read the topology of a graph; loaders over the same edges share one."""
    edges = find_edges(data)
    if edges is None:
        return CSRTopo(torch.empty(2, 0, dtype=torch.int64, device="cpu"), num_nodes=int(data.num_nodes))
    if isinstance(edges, np.ndarray):
        raise ArgumentTypeError("data.edge_index must be a tensor, got ndarray")
    key = (id(edges), version_of(edges), int(data.num_nodes), device)
    known = _COMPRESSED.get(key)
    # A strong reference: the last owner may drop the topology meanwhile.
    held = None if known is None else known[1]()
    if known is not None and held is not None and known[0]() is edges and has_content(edges, known[2]):
        return held
    content = read_content(edges)
    if isinstance(edges, Tensor) and edges.layout == torch.strided:
        try:
            topology = compress_edges(edges, int(data.num_nodes), device)
        except IdError as error:
            raise IdError(tell_count(str(error), data)) from error
    else:
        check_adjacency(edges, "data.edge_index" if "adj_t" not in data else "data.adj_t")
        topology = CSRTopo(edges)
        if topology.node_count != data.num_nodes:
            raise ArgumentError(
                f"data.num_nodes must equal the rows {topology.node_count} of adj_t, got {data.num_nodes}"
            )
    remember(_COMPRESSED, key, edges, topology, content)
    return topology


def compress_edges(edges: Tensor, num_nodes: int, device: torch.device, direction: str = "in") -> CSRTopo:
    """Compress a list of edges by in-neighbors or out-neighbors, on the GPU if it has room."""
    if device.type == "cuda" and edges.shape[-1] * _COMPRESS_BYTES < free_bytes(device.index) // 2:
        try:
            return CSRTopo(edges.to(device), num_nodes=num_nodes, direction=direction)
        except torch.OutOfMemoryError:
            # Free memory may be fragmented, or taken by others meanwhile.
            pass
        torch.cuda.empty_cache()
    return CSRTopo(edges.cpu(), num_nodes=num_nodes, direction=direction)


def remember(table: dict[tuple[Any, ...], Any], key: tuple[Any, ...], source: Any, value: Any, content: Any) -> None:
    """Cache in a table, by weak references, a value that was made from a source; entries of dead sources are removed.

    Args:
        content: The content of the source when the value was made; None if the value is the source itself, elsewhere.
    """
    for old in [k for k, (ref, made, _) in table.items() if ref() is None or made() is None]:
        del table[old]
    table[key] = (weakref.ref(source), weakref.ref(value), content)
