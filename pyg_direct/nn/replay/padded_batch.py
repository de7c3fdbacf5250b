"""Padded batches: their tensors keep their addresses and sizes, for any sampled batch (`PaddedBatch`) and for any batch
of many small graphs (`PaddedGraphs`).

Nodes and edges of each hop have their own places, for each type of nodes and each relation. In a batch without types,
unused places hold nodes that lead only to themselves. With types they hold nodes that lead only to such nodes. They
change no result of a model that reads only nodes and their neighbors.

In a batch of graphs, unused nodes belong to one more graph, and unused edges are loops of them. Edges are sorted by
target, as a sampled batch has them, so that both take one layout. `masked_norms` lets batch normalization leave the
padding out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import BatchNorm1d
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.nn.norm import BatchNorm

from pyg_direct.errors import ArgumentError
from pyg_direct.nn.replay.guards import find_norm_over_nodes
from pyg_direct.nn.sorted_edges import find_batch, register_sorted
from pyg_direct.ops.aggregate.build_edge_layout import Targets, fits, write_places

Relation: TypeAlias = tuple[str, str, str]
Counts: TypeAlias = tuple[int, ...]
Masks: TypeAlias = Mapping[int, tuple[Tensor, Tensor]]
# The type of all nodes, and the relation of all edges, of a batch without types.
NODES, EDGES = "", ("", "", "")
# Edges of a target without a known bound, in unused places.
_FEW_EDGES = 16
# Batches with types have many counts, small ones too, and fit only if each of them does: so many times the square root
# of a count, and so many nodes or edges, are left free besides a share.
_SPREAD, _LEAST_SLACK = 4, 8
# Places of batches with so many nodes are rounded up to a multiple: products take aligned rows, in pieces of one size.
_MANY, _ALIGNED = 1 << 14, 32
# Attributes that places for graphs have in any case, or that are made anew.
_OWN = frozenset(("edge_index", "batch", "ptr", "num_nodes"))


class Sizes(NamedTuple):
    """Nodes of each type and edges of each relation in each hop, or places for them."""

    nodes: dict[str, Counts]
    edges: dict[Relation, Counts]

    def find(self, key: Any) -> Counts:
        """Return the nodes of a type, or the edges of a relation, in each hop; a number of rows stands for itself."""
        if type(key) is int:
            return (key,)
        counts = self.nodes.get(key)
        return self.edges[key] if counts is None else counts

    def is_like(self, other: Any) -> bool:
        """Report whether both have the same types, relations and hops."""
        return (isinstance(other, Sizes) and _has_lengths(self.nodes, other.nodes)
                and _has_lengths(self.edges, other.edges))  # fmt: skip

    def join(self, other: Sizes) -> Sizes:
        """Return the larger of both."""
        return Sizes({key: tuple(map(max, own, other.nodes[key])) for key, own in self.nodes.items()},
                     {key: tuple(map(max, own, other.edges[key])) for key, own in self.edges.items()})  # fmt: skip

    def widen(self, margin: float, most_edges: Mapping[Relation, int], num_seeds: int | None = None) -> Sizes:
        """Return places for batches that are larger by a share, with at least one unused node in each hop of each
        type.

        Args:
            most_edges: Edges of a target in unused places, by relation.
            num_seeds: Most nodes of the first hop; None if they are larger by a share too.
        """
        is_large = EDGES not in self.edges and sum(map(sum, self.nodes.values())) >= _MANY
        unit = _ALIGNED if is_large else 1
        edges = {kind: tuple(_round_up(self._widen(count, margin), unit) for count in counts)
                 for kind, counts in self.edges.items()}  # fmt: skip
        nodes = {}
        for kind, counts in self.nodes.items():
            # Room for the padding edges of a smaller batch.
            into = [[math.ceil(4 * (self._find_slack(count, margin) + unit - 1) / most_edges[relation])
                     for count in own] for relation, own in self.edges.items() if relation[-1] == kind]  # fmt: skip
            spare = [1 + max(hop, default=0) for hop in zip(*into, strict=True)] if into else [1] * (len(counts) - 1)
            room = [max(self._widen(count, margin), count + extra)
                    for count, extra in zip(counts, [*spare, 1], strict=True)]  # fmt: skip
            room = room if num_seeds is None else [num_seeds + spare[0], *room[1:]]
            nodes[kind] = tuple(_round_up(count, unit) for count in room)
        return Sizes(nodes, edges)

    def _widen(self, count: int, margin: float) -> int:
        return count + self._find_slack(count, margin)

    def _find_slack(self, count: int, margin: float) -> int:
        spread = 0 if EDGES in self.edges else math.ceil(_SPREAD * math.sqrt(count)) + _LEAST_SLACK
        return math.ceil(count * margin) + spread


def _round_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def _has_lengths(counts: Mapping[Any, Counts], others: Mapping[Any, Counts]) -> bool:
    """Report whether both have the same keys, with as many numbers for each."""
    return counts.keys() == others.keys() and all(len(own) == len(others[key]) for key, own in counts.items())


def _list_stores(batch: Any) -> tuple[list[tuple[str, Any]], list[tuple[Relation, Any]]]:
    """List the stores of a batch by types of nodes, and by relations; without types both are the same."""
    if isinstance(batch, Data):
        return [(NODES, batch._store)], [(EDGES, batch._store)]
    return list(batch._node_store_dict.items()), list(batch._edge_store_dict.items())


def read_sizes(batch: Any) -> Sizes | None:
    """Read the sizes of a batch of pyg_direct loaders whose edges are known to be sorted; None for any other."""
    if type(batch) not in (Data, HeteroData) or find_input(batch) is None:
        return None
    of_nodes, of_edges = _list_stores(batch)
    nodes: dict[str, Counts] = {}
    edges: dict[Relation, Counts] = {}
    for kind, store in of_nodes:
        counts = store._mapping.get("num_sampled_nodes")
        if counts is None or sum(counts) != store.num_nodes:
            return None
        nodes[kind] = tuple(counts)
    for relation, store in of_edges:
        counts, edge_index = store._mapping.get("num_sampled_edges"), store._mapping.get("edge_index")
        if counts is None or not isinstance(edge_index, Tensor) or sum(counts) != edge_index.shape[1]:
            return None
        if edge_index.shape[1] > 0 and find_batch(edge_index) is None:
            return None
        edges[relation] = tuple(counts)
    return Sizes(nodes, edges) if edges else None


def find_input(batch: Any) -> str | None:
    """Return the type of the seeds; None if there is none, as in batches around links."""
    kinds = [kind for kind, store in _list_stores(batch)[0] if isinstance(store._mapping.get("batch_size"), int)]
    return kinds[0] if len(kinds) == 1 else None


class HopRows(NamedTuple):
    """Rows of a batch, their place, and the rows of each hop in both."""

    rows: Tensor
    place: Tensor
    counts: Sequence[int]
    room: Sequence[int]


# Bytes of a hop from which on it is copied alone: a GPU's launch for many tensors copies large ones at half the rate.
_COPIED_ALONE = 1 << 22


def copy_hops(parts: Iterable[HopRows]) -> None:
    """Copy rows of each hop to its places, the first of them; few rows of one dtype together."""
    pairs: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for rows, place, counts, room in parts:
        if rows.dtype.itemsize == 1:
            # Not every device copies lists of float8.
            rows, place = rows.view(torch.uint8), place.view(torch.uint8)
        targets, sources = pairs.setdefault(rows.dtype, ([], []))
        begin = 0
        # One call for the views of all hops.
        hops = torch.unsafe_split_with_sizes(rows, counts)
        for source, count, size in zip(hops, counts, room, strict=True):
            if count > 0:
                target = place.narrow(0, begin, count)
                if source.numel() * source.element_size() >= _COPIED_ALONE:
                    target.copy_(source)
                else:
                    targets.append(target)
                    sources.append(source)
            begin += size
    for targets, sources in pairs.values():
        if targets:
            torch._foreach_copy_(targets, sources)


class PaddedEdges:
    """Places for the edges of batches of up to some size.

    Args:
        edges: Edges of each relation of a batch like those to come.
        largest: Nodes and edges of each hop of the largest batches known.
        num_seeds: See `Sizes.widen`.

    Attributes:
        edge_index: The edges of each relation that a model is given; they keep their memory.
        places: Places for nodes of each type and edges of each relation in each hop.
    """

    def __init__(self, edges: Mapping[Relation, Tensor], largest: Sizes, margin: float, num_seeds: int | None = None
                 ) -> None:  # fmt: skip
        known = {kind: find_batch(edge_index) for kind, edge_index in edges.items()}
        self._max_degree = {kind: None if one is None else one.max_degree for kind, one in known.items()}
        self._most_edges = {kind: degree or _FEW_EDGES for kind, degree in self._max_degree.items()}
        self.places = largest.widen(margin, self._most_edges, num_seeds)
        # Types without relations.
        self._alone = [kind for kind in largest.nodes if all(kind not in (key[0], key[-1]) for key in edges)]
        self.edge_index = {kind: edge_index.new_zeros(2, sum(self.places.edges[kind]))
                           for kind, edge_index in edges.items()}  # fmt: skip

    def fill(self, edges: Mapping[Relation, Tensor], sizes: Sizes) -> bool:
        """Copy edges; False if they do not fit, or are of another kind."""
        nodes, room = self.places
        if not sizes.is_like(self.places):
            return False
        # `fits` counts the nodes of relations.
        if any(count > most for kind in self._alone
               for count, most in zip(sizes.nodes[kind], nodes[kind], strict=True)):  # fmt: skip
            return False
        parts = []
        for kind, out in self.edge_index.items():
            given = edges.get(kind)
            source, target = kind[0], kind[-1]
            counts = sizes.edges[kind]
            if (given is None or given.dtype != out.dtype or given.device != out.device
                    or given.shape != (2, sum(counts))):  # fmt: skip
                return False
            # Targets of relations between two types.
            ends = None if source == target else Targets(sizes.nodes[target], nodes[target])
            if not fits(sizes.nodes[source], counts, nodes[source], room[kind], self._most_edges[kind], ends):
                return False
            parts.append((given, sizes.nodes[source], counts, nodes[source], room[kind], out, ends))
        for part in parts:
            write_places(*part)
        return True

    def register(self) -> None:
        """Register the edges as sorted, and forget results for the edges before."""
        # Padding gives a target no more edges than others.
        for kind, out in self.edge_index.items():
            register_sorted(out, self.places.nodes[kind[0]], self.places.edges[kind], self._max_degree[kind],
                            self.places.nodes[kind[-1]])  # fmt: skip


class PaddedBatch:
    """Places for batches of up to some size, with types or without.

    Args:
        batch: A batch like those to come.
        largest: Nodes and edges of each hop of the largest batches known.
        names: Attributes to copy, rows of nodes or of edges, of the types and relations that have them.

    Attributes:
        data: The batch that a model is given; its tensors keep their memory.
    """

    def __init__(self, batch: Data | HeteroData, largest: Sizes, margin: float, names: Sequence[str]) -> None:
        given = _join_stores(batch)
        self._input = find_input(batch)
        assert self._input is not None, "a batch has seeds"
        self._num_seeds: int = given[self._input].batch_size
        has_types = EDGES not in largest.edges
        self._edges = PaddedEdges({kind: given[kind].edge_index for kind in largest.edges}, largest, margin,
                                  None if has_types else self._num_seeds)  # fmt: skip
        self.places = places = self._edges.places
        self.data: Any = HeteroData() if has_types else Data()
        self._stores: dict[Any, Any] = {key: self.data[key] if has_types else self.data._store
                                        for part in places for key in part}  # fmt: skip
        self._names: list[tuple[Any, str]] = []
        for key, store in self._stores.items():
            is_nodes, counts = key in places.nodes, places.find(key)
            for name in names:
                rows = given[key]._mapping.get(name)
                if rows is None:
                    continue
                if isinstance(rows, Tensor) and (
                    given[key].is_node_attr(name) if is_nodes else given[key].is_edge_attr(name)
                ):
                    store[name] = rows.new_zeros(sum(counts), *rows.shape[1:])
                    self._names.append((key, name))
                elif has_types:
                    raise ArgumentError(f"names must be of tensors with a row for each node or edge, got {name!r} of "
                                        f"{key!r}")  # fmt: skip
            if is_nodes:
                store.num_nodes, store.num_sampled_nodes = sum(counts), list(counts)
            else:
                store.edge_index, store.num_sampled_edges = self._edges.edge_index[key], list(counts)
        missing = [name for name in names if all(name != own for _, own in self._names)]
        if missing:
            raise ArgumentError(f"names must be of tensors with a row for each node or edge, got {missing[0]!r}")
        self._stores[self._input].batch_size = self._num_seeds

    def fill(self, batch: Any, *, is_replayed: bool = False) -> bool:
        """Copy a batch; False if it does not fit, or is of another kind.

        Args:
            is_replayed: True if a graph alone reads the places, and no code of a model.
        """
        sizes, places = read_sizes(batch), self.places
        given = {} if sizes is None else _join_stores(batch)
        if (
            sizes is None
            or given.keys() != self._stores.keys()
            or given[self._input]._mapping.get("batch_size") != self._num_seeds
            or not all(self._matches(key, name, given[key]._mapping.get(name), sizes) for key, name in self._names)
            or not self._edges.fill({kind: given[kind]._mapping["edge_index"] for kind in places.edges}, sizes)
        ):
            return False
        if not is_replayed:
            self._edges.register()
        copy_hops(HopRows(given[key]._mapping[name], self._stores[key]._mapping[name], sizes.find(key),
                          places.find(key)) for key, name in self._names)  # fmt: skip
        return True

    def _matches(self, key: Any, name: str, given: Any, sizes: Sizes) -> bool:
        own = self._stores[key]._mapping[name]
        if not isinstance(given, Tensor) or given.dtype != own.dtype or given.device != own.device:
            return False
        return given.shape == (sum(sizes.find(key)), *own.shape[1:])


def _join_stores(batch: Any) -> dict[Any, Any]:
    """Return the stores of a batch by types of nodes and relations."""
    of_nodes, of_edges = _list_stores(batch)
    return dict([*of_nodes, *of_edges])


class GraphSizes(NamedTuple):
    """Nodes, edges and graphs of a batch; of the largest batches known, nodes and edges."""

    nodes: int
    edges: int
    graphs: int

    def find(self, key: str) -> Counts:
        """Return the nodes, edges or graphs."""
        return (getattr(self, key),)

    def is_like(self, other: Any) -> bool:
        """Report whether both have as many graphs."""
        return isinstance(other, GraphSizes) and self.graphs == other.graphs

    def join(self, other: GraphSizes) -> GraphSizes:
        """Return the larger of both."""
        return GraphSizes(*map(max, self, other))


def read_graph_sizes(batch: Any) -> GraphSizes | None:
    """Read the sizes of a batch of graphs without types, as `DataLoader` makes it; None for any other."""
    # Attributes of other classes may hold numbers of edges, whose order changes, or of graphs.
    if not isinstance(batch, Batch) or Data not in type(batch).__bases__:
        return None
    mapping = batch._store._mapping
    if not all(type(mapping.get(name)) is Tensor for name in ("edge_index", "batch", "ptr")):
        return None
    if mapping["edge_index"].dim() != 2 or "adj_t" in mapping:
        return None
    if any(name.endswith(("_batch", "_ptr")) for name in mapping):
        return None
    return GraphSizes(int(mapping["batch"].numel()), int(mapping["edge_index"].shape[1]), batch.num_graphs)


class PaddedGraphs:
    """Places for batches of as many graphs, of up to some size.

    Args:
        batch: A batch like those to come.
        names: Attributes to copy, each with a row for each node or edge, or with as many rows in every batch; None for
            all tensors of the batch.

    Attributes:
        data: The batch that a model is given; its tensors keep their memory. It has one graph more than a batch has,
            the last one, which holds the padding.
        masks: See `masked_norms`.
    """

    def __init__(self, batch: Any, largest: GraphSizes, margin: float, names: Sequence[str] | None) -> None:
        self._graphs = largest.graphs
        room = largest.nodes + math.ceil(largest.nodes * margin)
        while True:
            # Nodes of one hop, to which all edges lead.
            sizes = Sizes({NODES: (largest.nodes, 0)}, {EDGES: (largest.edges,)})
            edges = PaddedEdges({EDGES: batch.edge_index.new_empty(2, 0)}, sizes, margin, room)
            self.places = places = GraphSizes(sum(edges.places.nodes[NODES]), sum(edges.places.edges[EDGES]),
                                              largest.graphs + 1)  # fmt: skip
            if places.nodes not in places[1:]:
                break
            # Rows are told apart by their number.
            room += 1
        self._edges = edges
        if names is None:
            names = [name for name, value in batch._store.items() if type(value) is Tensor and name not in _OWN]
        self.data, self._kinds = Batch(_base_cls=Data), dict[str, str]()
        for name in names:
            rows = getattr(batch, name, None)
            if not isinstance(rows, Tensor) or rows.dim() == 0 or name in _OWN:
                raise ArgumentError(f"names must be of tensors with rows of nodes, edges or graphs, got {name!r}")
            kind = "node" if batch.is_node_attr(name) else "edge" if batch.is_edge_attr(name) else "graph"
            self._kinds[name] = kind
            count = {"node": places.nodes, "edge": places.edges, "graph": len(rows)}[kind]
            # Padding holds values that a model is made for, such as numbers of atoms.
            self.data[name] = rows.detach()[:1].expand(count, *rows.shape[1:]).clone()
        self.data.edge_index = edges.edge_index[EDGES]
        self.data.batch, self.data.ptr = batch.batch.new_empty(places.nodes), batch.ptr.new_empty(places.graphs + 1)
        self.data.num_nodes = places.nodes
        self.data._store.__dict__["_num_graphs"] = places.graphs
        device = batch.edge_index.device
        self.masks: Masks = {rows: (torch.zeros(rows, 1, device=device), torch.zeros((), device=device))
                             for rows in places}  # fmt: skip
        # Sizes that the masks are of.
        self._counted = GraphSizes(0, 0, 0)

    def fill(self, batch: Any, *, is_replayed: bool = False) -> bool:
        """Copy a batch; see `PaddedBatch.fill`."""
        sizes = read_graph_sizes(batch)
        if sizes is None or sizes.graphs != self._graphs:
            return False
        # At least one node is left over for the last graph.
        if sizes.nodes >= self.places.nodes or not all(self._matches(name, batch, sizes) for name in self._kinds):
            return False
        targets, order = batch.edge_index[1].sort(stable=True)
        edges = {EDGES: torch.stack([batch.edge_index[0][order], targets])}
        if not self._edges.fill(edges, Sizes({NODES: (sizes.nodes, 0)}, {EDGES: (sizes.edges,)})):
            return False
        if not is_replayed:
            self._edges.register()
        data = self.data
        data.batch.fill_(self._graphs)[: sizes.nodes].copy_(batch.batch)
        data.ptr.fill_(self.places.nodes)[:-1].copy_(batch.ptr)
        for name, kind in self._kinds.items():
            rows = batch[name]
            data[name][: len(rows)].copy_(rows[order] if kind == "edge" else rows)
        for (mask, total), count, before in zip(self.masks.values(), sizes, self._counted, strict=True):
            if count != before:
                mask.zero_()[:count].fill_(1)
                total.fill_(count)
        self._counted = sizes
        return True

    def find_varying(self, batch: Any) -> str | None:
        """Return an attribute of a batch of as many graphs that has no place, as its shape or dtype differs from batch
        to batch; None without one.
        """
        sizes = read_graph_sizes(batch)
        if sizes is None or sizes.graphs != self._graphs:
            return None
        return next((name for name in self._kinds if not self._matches(name, batch, sizes)), None)

    def _matches(self, name: str, batch: Any, sizes: GraphSizes) -> bool:
        given, own, kind = batch._store._mapping.get(name), self.data[name], self._kinds[name]
        if not isinstance(given, Tensor) or given.dtype != own.dtype or given.device != own.device:
            return False
        count = {"node": sizes.nodes, "edge": sizes.edges, "graph": len(own)}[kind]
        return given.shape == (count, *own.shape[1:])


def find_other_norm(model: torch.nn.Module) -> str | None:
    """Return the first norm over all nodes that `masked_norms` does not serve, and its name; None without one."""
    served: set[torch.nn.Module] = {part for part in model.modules()
                                    if type(part) is BatchNorm1d and "forward" not in part.__dict__}  # fmt: skip
    served |= {part for part in model.modules() if type(part) is BatchNorm and part.module in served}
    return find_norm_over_nodes(model, served)


@contextmanager
def masked_norms(model: torch.nn.Module, masks: Masks | None) -> Iterator[None]:
    """Let batch normalization of a model take its statistics from rows of the batch, without the padding.

    Args:
        model: The model; nothing of it stays changed.
        masks: By number of rows: 1 for rows of the batch and 0 for the others, float32 `[rows, 1]`; and their sum.
            None for no change.
    """
    if masks is None:
        yield
        return
    norms: list[Any] = [part for part in model.modules() if type(part) is BatchNorm1d]
    for part in norms:
        part.forward = partial(_normalise, part, masks)
    try:
        yield
    finally:
        for part in norms:
            del part.forward


def _normalise(self: BatchNorm1d, masks: Masks, rows: Tensor) -> Tensor:
    """Compute `BatchNorm1d.forward` for rows of which some are padding."""
    if not self.training and self.running_mean is not None:
        return BatchNorm1d.forward(self, rows)
    if rows.dim() != 2 or len(rows) not in masks:
        raise RuntimeError(f"batch normalization of rows of shape {tuple(rows.shape)}, which are neither of nodes nor "
                           "of edges or graphs, would read padding")  # fmt: skip
    mask, count = masks[len(rows)]
    given = rows.float() if rows.itemsize < 4 else rows
    # Padding may hold any number.
    kept = given.where(mask > 0, 0)
    mean = kept.sum(0) / count
    apart = (given - mean).where(mask > 0, 0)
    variance = apart.square().sum(0) / count
    if self.training and self.running_mean is not None and self.running_var is not None:
        with torch.no_grad():
            assert self.num_batches_tracked is not None, "kept with the means"
            self.num_batches_tracked += 1
            share = 1.0 / self.num_batches_tracked.float() if self.momentum is None else self.momentum
            self.running_mean += (mean - self.running_mean) * share
            self.running_var += (variance * count / (count - 1) - self.running_var) * share
    out = (given - mean) * (variance + self.eps).rsqrt()
    if self.weight is not None:
        out = out * self.weight + self.bias
    return out.to(rows.dtype)
