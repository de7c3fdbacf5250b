"""Links as seeds: ends, negatives, labels and times, and their positions in a batch, as PyG has them.

`Negatives` caches, for copies of a sampler, the sources of negatives and the edges that they avoid.

`find_ways` finds the relations that hold the seed links of a batch, or their reverse edges. Such edges would leak the
links.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch_geometric.sampler import EdgeSamplerInput, HeteroSamplerOutput, NegativeSampling, SamplerOutput

from pyg_direct.errors import ArgumentError, ArgumentTypeError, LoaderWarning, warn
from pyg_direct.graph.hetero_topo import LINKS, EdgeType
from pyg_direct.ops.argument_checks import are_plain_ids, check_ids
from pyg_direct.ops.compute_content_hash import has_content, read_content
from pyg_direct.ops.rows.upload import upload
from pyg_direct.runtime.cuda.launch import current_stream, is_current
from pyg_direct.runtime.host.tensor_views import version_of
from pyg_direct.runtime.host.threads import one_thread
from pyg_direct.sampler.graph_reader import Parts
from pyg_direct.sampler.keyed_sampler import to_general_output, to_output
from pyg_direct.sampling.captured_plan import Finished, Pending, PendingOutput
from pyg_direct.sampling.hetero_sample import GeneralSample, find_partner
from pyg_direct.sampling.negative_links import TRIES, AskedNodes, Drawn, Edges, EdgeSet, Nodes, draw_negatives
from pyg_direct.sampling.sampling_options import Sample
from pyg_direct.sampling.seeds import Ends, Excluded

# Relations, and True for relations with the reverse edges of the links.
Ways: TypeAlias = tuple[tuple[EdgeType, bool], ...]
# Pairs of links and relations of a group of batches up to which a plan on a GPU excludes their edges itself.
MOST_EXCLUDED = 1 << 14
# Sorted arrays of pairs that negatives of such a plan may avoid: edges, and links that are none.
_MOST_PARTS = 2


def check_exclusion(exclude: Any, rev_edge_type: Any, parts: Parts) -> None:
    """Check the options that choose which edges a batch leaves out."""
    if not isinstance(exclude, (bool, str)) or exclude not in (False, True, "reverse"):
        raise ArgumentError(f"exclude_target_edges must be False, True or 'reverse', got {exclude!r}")
    if rev_edge_type is None:
        return
    if exclude != "reverse":
        raise ArgumentError("rev_edge_type must be None unless exclude_target_edges='reverse', got "
                            f"{rev_edge_type!r} with exclude_target_edges={exclude!r}")  # fmt: skip
    if not parts.is_hetero:
        raise ArgumentError("rev_edge_type must be None for a graph without types, whose reverse edges are the links "
                            f"turned round, got {rev_edge_type!r}")  # fmt: skip
    if not isinstance(rev_edge_type, (tuple, list)):
        raise ArgumentTypeError(f"rev_edge_type must be a relation (source, name, target), got {rev_edge_type!r}")
    if tuple(rev_edge_type) not in parts.edges:
        raise ArgumentError(f"rev_edge_type must be a relation of the graph, got {rev_edge_type!r} of "
                            f"{list(parts.edges)}")  # fmt: skip


def find_ways(parts: Parts, edge_type: EdgeType | None, *, with_reverse: bool, is_bidirectional: bool,
              rev_edge_type: Sequence[str] | None) -> Ways:  # fmt: skip
    """Find the relations from which the links of a relation are excluded.

    Args:
        edge_type: The relation of the links; None without types.
        is_bidirectional: The batch has edges in both directions, so that either one leaks a link.
        rev_edge_type: The relation of the reverse edges; None to find it.
    """
    if not parts.is_hetero:
        return ((LINKS, False), (LINKS, True)) if with_reverse or is_bidirectional else ((LINKS, False),)
    assert edge_type is not None
    known, back = list(parts.edges), []
    if is_bidirectional:
        partner = find_partner(edge_type, known) if edge_type in known else None
        back = [kind for kind in known if kind == partner or find_partner(kind, known) == edge_type]
    if with_reverse:
        back += _find_reverse(parts, edge_type, rev_edge_type)
    ways = [(edge_type, False), *((kind, True) for kind in dict.fromkeys(back))]
    return tuple(way for way in ways if way[0] in known)


def _find_reverse(parts: Parts, edge_type: EdgeType, given: Sequence[str] | None) -> list[EdgeType]:
    """Find the relations that hold the reverse edges of another."""
    source, name, target = edge_type
    if given is not None:
        reverse: EdgeType = tuple(given)  # type: ignore[assignment]
        if (reverse[0], reverse[-1]) != (target, source):
            raise ArgumentError(f"rev_edge_type must lead back from {target!r} to {source!r} for links of {edge_type}, "
                                f"got {reverse}")  # fmt: skip
        return [reverse]
    others = [kind for kind in parts.edges if (kind[0], kind[-1]) == (target, source) and kind != edge_type]
    for other in (f"rev_{name}", name.removeprefix("rev_")):
        named = target, other, source
        if named in others:
            # Also relations with exactly the same edges under another name.
            return [named, *(kind for kind in others if kind != named and parts.is_reverse(edge_type, kind))]
    found = {kind: parts.is_reverse(edge_type, kind) for kind in others}
    own = [edge_type] if source == target else []
    if None in found.values() or (others and not own and not any(found.values())):
        raise ArgumentError(
            "exclude_target_edges='reverse' must know the relation of the reverse edges: none is named "
            f"{(target, f'rev_{name}', source)}, and none is known to have the edges of {edge_type} turned round; pass "
            f"rev_edge_type, one of {others}, or exclude_target_edges=True to leave reverse edges in the batch"
        )
    return own + [kind for kind in others if found[kind]]


class _Ends(NamedTuple):
    """Node types and numbers of nodes at the ends of links; types are None without types."""

    source: str | None
    target: str | None
    num_sources: int
    num_targets: int


def _read_ends(parts: Parts, edge_type: EdgeType | None) -> _Ends:
    if not isinstance(parts.num_nodes, dict):
        return _Ends(None, None, parts.num_nodes, parts.num_nodes)
    if edge_type is None:
        raise ArgumentError("edge_label_index must name a relation of a graph with types, got none")
    for end in (edge_type[0], edge_type[-1]):
        if end not in parts.num_nodes:
            raise ArgumentError(f"edge_label_index must name known node types, got {end!r} of {list(parts.num_nodes)}")
    return _Ends(edge_type[0], edge_type[-1], parts.num_nodes[edge_type[0]], parts.num_nodes[edge_type[-1]])


def name_ends(edge_type: EdgeType | None) -> tuple[str, str]:
    """Name the sources and the targets of links for errors, with their types."""
    if edge_type is None:
        return "edge_label_index", "edge_label_index"
    return f"edge_label_index[0], of {edge_type[0]!r},", f"edge_label_index[1], of {edge_type[-1]!r},"


def _check_ends(index: EdgeSamplerInput, ends: _Ends) -> tuple[Tensor, Tensor]:
    """Check the ids of links, and return sources and targets, int64."""
    sources, targets = index.row, index.col
    given = (sources, ends.num_sources), (targets, ends.num_targets)
    if not all(isinstance(ids, Tensor) and are_plain_ids(ids, count) for ids, count in given):
        names = name_ends(index.input_type)
        sources, targets = (check_ids(name, ids, count).long() for name, (ids, count) in zip(names, given, strict=True))
    if sources.numel() != targets.numel():
        raise ArgumentError("edge_label_index must have as many sources as targets, got "
                            f"{sources.numel()} and {targets.numel()}")  # fmt: skip
    return sources, targets


def check_negatives(index: EdgeSamplerInput, neg_sampling: NegativeSampling, source: NegativeSource) -> None:
    """Check that links have what their negatives need."""
    if source.has_times and index.time is None:
        raise ArgumentError("edge_label_time must be given for negatives among nodes with times, got None")
    if neg_sampling.is_triplet() and index.label is not None:
        raise ArgumentError("edge_label must be None with triplets, whose index fields say what is negative")


def _warn_of_untimely(count: int, num_negatives: int) -> None:
    if count:
        warn(f"{count} of {num_negatives} negatives of a batch are later than their link, as no node is that early",
             LoaderWarning)  # fmt: skip


def _warn_of_edges(count: int, num_negatives: int) -> None:
    if count:
        warn(f"strict_negatives: {count} of {num_negatives} negatives of a batch are edges or positive links, as "
             f"{TRIES} draws met nothing else", LoaderWarning)  # fmt: skip


def _list_by_way(pairs: Tensor, ways: Ways) -> Excluded:
    """List links `[2, L]` by each relation that holds them."""
    found: dict[EdgeType, Tensor] = {}
    for kind, is_turned in ways:
        own = pairs.flip(0) if is_turned else pairs
        found[kind] = torch.cat([found[kind], own], 1) if kind in found else own
    return found


class PositiveLinks:
    """Positive links of a loader or a batch, which strict negatives avoid.

    Args:
        sources, targets: Ids of the ends of all links, int64 or int32 `[L]`.
        is_positive: True for positive links, bool `[L]`; None if all are positive.
    """

    def __init__(self, sources: Tensor, targets: Tensor, is_positive: Tensor | None) -> None:
        if is_positive is not None:
            is_positive = is_positive.to(sources.device)
            sources, targets = sources[is_positive], targets[is_positive]
        self._sources, self._targets = sources, targets

    def join(self, source: NegativeSource) -> Edges:
        """Join the links with the edges of a strict source: its negatives avoid both; see `Edges.with_links`."""
        assert source.edges is not None
        ends = (end.to(source.device).long() for end in (self._sources, self._targets))
        return source.edges.with_links(*ends, is_one_type=source.is_one_type)


class LoaderLinks(EdgeSamplerInput):  # type: ignore[misc]
    """All links of a loader; each batch refers to them, so that strict negatives avoid them.

    Args:
        has_negatives: True if the links with the lowest label are negative (`tells_negatives`).
    """

    def __init__(self, links: EdgeSamplerInput, has_negatives: bool) -> None:
        # Not the base class's constructor, which copies both ends.
        self.__dict__.update(vars(links))
        self._has_negatives = has_negatives
        self._positives: PositiveLinks | None = None

    @property
    def positives(self) -> PositiveLinks:
        """The positive links."""
        if self._positives is None:
            is_positive = self.label != self.label.min() if self._has_negatives else None
            self._positives = PositiveLinks(self.row, self.col, is_positive)
        return self._positives

    def __getitem__(self, index: Any) -> EdgeSamplerInput:
        if isinstance(index, Tensor) and index.dtype == torch.int64 and index.dim() == 1 and not index.is_cuda:
            return self.take(index)
        links = super().__getitem__(index)
        links.loader_links = self
        return links

    def take(self, index: Tensor, ends: Tensor | None = None) -> EdgeSamplerInput:
        """Return the links at these positions, int64 `[B]` on the CPU.

        Args:
            ends: Their sources and targets, `[B, 2]`, if they are known; otherwise they are looked up.
        """
        # Not by indexing, which wakes torch's threads for a few thousand items; nor copied by the base class.
        links = EdgeSamplerInput.__new__(EdgeSamplerInput)
        links.input_id = index if self.input_id is None else self.input_id.index_select(0, index)
        if ends is not None and ends.dim() == 2:
            links.row, links.col = ends.t().contiguous().unbind()
        else:
            links.row, links.col = self.row.index_select(0, index), self.col.index_select(0, index)
        links.label = None if self.label is None else self.label.index_select(0, index)
        links.time = None if self.time is None else self.time.index_select(0, index)
        links.input_type, links.loader_links = self.input_type, self
        return links

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_positives": None}


def tells_negatives(label: Tensor) -> bool:
    """Check if labels are 0 for negative and 1 for positive links; other labels are classes of positive links."""
    is_binary = label.dim() == 1 and label.numel() > 0 and bool(((label == 0) | (label == 1)).all())
    return is_binary and bool(label.min() != label.max())


class NegativeSource:
    """Source of the negative links of a relation.

    Args:
        edge_type: The relation; None without types.
        weights: Weights of sources and of targets; None for equal ones.

    Attributes:
        is_one_type: True if links connect nodes of one type.
        edges: Edges that negatives avoid; None unless strict.
    """

    def __init__(self, parts: Parts, edge_type: EdgeType | None, weights: tuple[Tensor | None, Tensor | None],
                 strict: bool, device: torch.device) -> None:  # fmt: skip
        ends = _read_ends(parts, edge_type)
        times = [parts.node_time, parts.node_time]
        if isinstance(parts.node_time, dict):
            times = [parts.node_time.get(ends.source), parts.node_time.get(ends.target)]
        self.is_one_type = ends.source == ends.target
        self.has_times = any(time is not None for time in times)
        self.sources = Nodes(ends.num_sources, weights[0], times[0], device)
        self.targets = Nodes(ends.num_targets, weights[1], times[1], device)
        self.edges: Edges | None = None
        self._ends, self._times, self.device = ends, times, device
        # A reference keeps the weight alive, and so its id, which is the key of this object.
        self.weights = weights
        self._contents = [(version_of(weight), read_content(weight)) for weight in weights]
        if strict and (edge_type is None or edge_type in parts.edges):
            self.edges = parts.edge_set(edge_type, ends.num_sources, ends.num_targets, device)
        elif strict:
            none = torch.empty(0, dtype=torch.int64, device=device)
            self.edges = EdgeSet(none, none, ends.num_sources, ends.num_targets)

    def is_current(self) -> bool:
        """Check if the weights are unchanged, as far as `has_content` looks."""
        return all(version_of(weight) == version and has_content(weight, known)
                   for weight, (version, known) in zip(self.weights, self._contents, strict=True))  # fmt: skip

    def drawn_by(self, neg_sampling: NegativeSampling) -> NegativeSource:
        """Copy the source, with nodes that a user's subclass of `NegativeSampling` draws."""
        made, ends = copy.copy(self), self._ends
        made.sources, made.targets = (
            AskedNodes(count, time, self.device, partial(_ask_for, neg_sampling, end))
            for end, count, time in zip(("src", "dst"), (ends.num_sources, ends.num_targets), self._times, strict=True)
        )
        return made


class Negatives:
    """Cache of the sources of a graph's negative links, and of the edges that negatives avoid."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._sources: dict[Any, NegativeSource] = {}
        # By the ids of positive links and of edges, which are unique while both are kept here. The source's id cannot
        # serve: a user's own sampling method makes a new source for each batch, over the same edges.
        self._avoided: dict[tuple[int, int], tuple[PositiveLinks, Edges, Edges]] = {}

    def find(self, neg_sampling: NegativeSampling, edge_type: EdgeType | None, strict: bool, device: torch.device
             ) -> NegativeSource:  # fmt: skip
        """Find the source of a relation's negatives.

        Args:
            neg_sampling: Its weights choose the nodes, or its own `sample` method.
            edge_type, strict, device: See `NegativeSource`.
        """
        weights = neg_sampling.src_weight, neg_sampling.dst_weight
        versions = [None if weight is None else (id(weight), version_of(weight)) for weight in weights]
        key = edge_type, strict, *versions
        made = self._sources.get(key)
        if made is None:
            made = self._sources[key] = NegativeSource(self._parts, edge_type, weights, strict, device)
        return made.drawn_by(neg_sampling) if draws_itself(neg_sampling) else made

    def list_avoided(self, source: NegativeSource, links: EdgeSamplerInput) -> Edges | None:
        """List edges and positive links that negatives avoid, made once for a loader; None unless strict.

        Args:
            links: The links of a batch, which refer to all links if the loader is ours.
        """
        if source.edges is None:
            return None
        given: LoaderLinks | None = getattr(links, "loader_links", None)
        if given is None:
            # From a loader of another package: only these links are known, and a label of 0 means negative, as for
            # drawn ones.
            is_positive = None if links.label is None or links.label.dim() != 1 else links.label != 0
            return PositiveLinks(links.row, links.col, is_positive).join(source)
        positives = given.positives
        key = id(positives), id(source.edges)
        if key not in self._avoided:
            self._avoided[key] = positives, source.edges, positives.join(source)
        return self._avoided[key][-1]

    def find_avoided(self, source: NegativeSource | None, inputs: Sequence[EdgeSamplerInput]
                     ) -> tuple[Sequence[Edges | None], bool]:  # fmt: skip
        """Find (the pairs that negatives of each of several batches avoid, None for none; True if a plan on a GPU can
        avoid them).

        Args:
            source: Source of the negatives; None for no negatives.
        """
        none = [None] * len(inputs)
        if source is None or source.edges is None:
            return none, True
        if not isinstance(source.edges, EdgeSet):
            # The plan of a graph in parts exchanges.
            return [self.list_avoided(source, links) for links in inputs], True
        # All batches of a loader of ours avoid the same pairs.
        loaders = {id(getattr(links, "loader_links", None)) for links in inputs}
        avoided = self.list_avoided(source, inputs[0]) if len(loaders) == 1 and id(None) not in loaders else None
        is_known = type(avoided) is EdgeSet and len(avoided.parts) <= _MOST_PARTS
        return ([avoided] * len(inputs), True) if is_known else (none, False)

    def forget_written(self) -> None:
        """Forget sources whose weights were written, in any way."""
        gone = [key for key, made in self._sources.items() if not made.is_current()]
        edges = {id(self._sources.pop(key).edges) for key in gone}
        self._avoided = {key: kept for key, kept in self._avoided.items() if key[1] not in edges}


def draws_itself(neg_sampling: NegativeSampling) -> bool:
    """Check if a user's subclass or a patch overrides the drawing of negatives."""
    return type(neg_sampling).sample is not NegativeSampling.sample or "sample" in neg_sampling.__dict__


def _ask_for(neg_sampling: NegativeSampling, end: str, count: int, num_nodes: int) -> Tensor:
    drawn: Tensor = neg_sampling.sample(count, end, num_nodes)
    return drawn


class Links:
    """The links of a batch, positive ones first. `is_hetero`: True if the graph has types."""

    def __init__(self, index: EdgeSamplerInput, parts: Parts, device: torch.device) -> None:
        self._index, self._device, self.is_hetero = index, device, parts.is_hetero
        self._ends = _read_ends(parts, index.input_type)
        sources, targets = _check_ends(index, self._ends)
        if device.type == "cuda" and sources.device == targets.device:
            # One copy for both.
            self._sources, self._targets = upload(torch.stack([sources, targets]), device).unbind()
        else:
            self._sources, self._targets = upload(sources, device), upload(targets, device)
        self._num_links = self._sources.numel()
        self._label = None if index.label is None else upload(index.label, device)
        self._time = None if index.time is None else upload(index.time, device)
        # Numbers of negative sources and targets.
        self._more_sources = self._more_targets = 0
        self._mode: str | None = None
        # Positions of the sources and then of the targets, int64.
        self._places: Tensor | None = None
        self._both: Tensor | None = None
        # The ids that `seeds` returned, by type.
        self._ids: dict[Any, Tensor] = {}
        self._drawn: Drawn | None = None
        # By the number of negatives.
        self._owners_by: dict[int, Tensor] = {}
        # The stream on which all of these are allocated.
        self._stream = current_stream(device.index) if device.type == "cuda" else None

    def add_negatives(self, neg_sampling: NegativeSampling, source: NegativeSource, key: int,
                      edges: Edges | None = None) -> None:  # fmt: skip
        """Draw negatives: number j belongs to link j modulo the number of links.

        Args:
            edges: Pairs to avoid; None for none.
        """
        check_negatives(self._index, neg_sampling, source)
        self._mode = neg_sampling.mode.value
        count = math.ceil(self._num_links * neg_sampling.amount)
        is_triplet = neg_sampling.is_triplet()
        self._more_targets, self._more_sources = count, 0 if is_triplet else count
        until = None
        if source.has_times:
            assert self._time is not None
            latest = self._time if self._time.dim() == 1 else self._time[:, 1]
            until = latest[self._owners_of(count)[self._num_links :]]
        sources = self._sources[self._owners_of(count)[self._num_links :]] if is_triplet else source.sources
        drawn = draw_negatives(count, key, source.targets, sources=sources, until=until, edges=edges,
                               device=self._device)  # fmt: skip
        _warn_of_edges(drawn.num_edges, count)
        self._drawn = drawn
        if is_triplet:
            self._targets = torch.cat([self._targets, drawn.targets])
            return
        # In one step, as `ends` returns both.
        self._both = torch.cat([self._sources, drawn.sources, self._targets, drawn.targets])
        self._sources, self._targets = self._both.view(2, self._num_links + count).unbind()
        if self._label is None:
            self._label = torch.zeros(self._num_links + count, device=self._device)
            self._label.narrow(0, 0, self._num_links).fill_(1)
        else:
            self._label = torch.cat([self._label, self._label.new_zeros((count, *self._label.shape[1:]))])

    def _owners_of(self, num_negatives: int) -> Tensor:
        """Return the link of each end, negatives last, int64."""
        known = self._owners_by.get(num_negatives)
        if known is None:
            ends = torch.arange(self._num_links + num_negatives, device=self._device)
            known = self._owners_by[num_negatives] = ends.remainder_(max(self._num_links, 1))
        return known

    def ends(self) -> Tensor:
        """Return sources, then targets, of a graph without types, int64, with duplicates."""
        if self._both is None:
            self._both = torch.cat([self._sources, self._targets])
        return self._both

    def note_stream(self) -> None:
        """Mark all tensors as used on the current stream for torch's allocator, if that is another stream."""
        if self._stream is None or is_current(self._stream):
            return
        stream = current_stream(self._stream.device_index)
        held = [*vars(self).values(), *self._ids.values(), *self._owners_by.values()]
        held += self._drawn or ()
        for value in {id(value): value for value in held}.values():
            if isinstance(value, Tensor) and value.is_cuda:
                value.record_stream(stream)

    def place(self, nodes: Tensor) -> None:
        """Note the positions of the ends among the ascending `nodes`, which are the seeds of a sample."""
        with one_thread(nodes.device.type == "cpu"):
            self._places = torch.searchsorted(nodes, self.ends())

    def place_in(self, sample: GeneralSample) -> None:
        """Note the positions of the ends from `seeds` among the seeds of a sample, unless each has a tree."""
        if self._places is not None:
            return
        places = self._places = self._sources.new_empty(self._sources.numel() + self._targets.numel())
        begin = 0
        with one_thread(self._device.type == "cpu"):
            for name, ids in self._ids.items():
                kind = next(iter(sample.node)) if name is None else name
                out = places[begin : begin + ids.numel()]
                torch.searchsorted(sample.node[kind][: sample.num_seeds[kind]], ids, out=out)
                begin += ids.numel()

    def seeds(self, disjoint: bool) -> tuple[Any, Any]:
        """Return (seeds, their times) for a sampler, by type in a graph with types.

        Args:
            disjoint: Each end is a separate seed; otherwise each node is one seed, and the returned ends may repeat.
        """
        ends, time = self._ends, self._time
        lists = [self._sources, self._targets]
        names: list[Any] = [ends.source, ends.target]
        is_one_type = ends.source == ends.target
        if is_one_type:
            lists, names = [self.ends()], names[:1]
        self._ids, self._places, times = dict(zip(names, lists, strict=True)), None, None
        if disjoint:
            num_sources = self._sources.numel()
            self._places = torch.arange(num_sources + self._targets.numel(), device=self._device)
            if not is_one_type:
                self._places[num_sources:] -= num_sources
        if disjoint or time is not None:
            owners = [self._owners_of(count) for count in (self._more_sources, self._more_targets)]
            self._owners = torch.cat(owners)
            times = None if time is None else [time[own] for own in ([self._owners] if is_one_type else owners)]
        if ends.source is None:
            return lists[0], None if times is None else times[0]
        return self._ids, None if times is None else dict(zip(names, times, strict=True))

    def finish(self, out: SamplerOutput | HeteroSamplerOutput, disjoint: bool) -> SamplerOutput | HeteroSamplerOutput:
        """Number the trees of `out` by links and note the positions of links in its metadata, as PyG does."""
        _warn_of_untimely(0 if self._drawn is None else self._drawn.num_untimely, self._more_targets)
        if disjoint and out.batch is not None:
            if isinstance(out.batch, dict):
                out.batch = {kind: self._owners[batch] for kind, batch in out.batch.items()}
            else:
                out.batch = self._owners[out.batch]
        assert self._places is not None
        time, count = self._time, self._num_links
        if self._mode == "triplet":
            sources, targets = self._places.split([self._sources.numel(), self._targets.numel()])
            amount = self._targets.numel() // count - 1 if count else 1
            negatives = targets[count:].view(amount, count).t().contiguous().squeeze(-1)
            out.metadata = (self._index.input_id, sources, targets[:count], negatives, time)
            return out
        if time is not None:
            time = time[self._owners_of(self._more_sources)]
        # There are as many targets as sources.
        out.metadata = (self._index.input_id, self._places.view(2, self._sources.numel()), self._label, time)
        return out

    def list_excluded(self, ways: Ways) -> Excluded:
        """List, by relation, the pairs whose edges the batch leaves out.

        Args:
            ways: Relations that hold the links; see `find_ways`.
        """
        return _list_by_way(torch.stack([self._sources[: self._num_links], self._targets[: self._num_links]]), ways)


class CapturedLinks:
    """The links of a batch whose negatives are drawn, and whose ends are found, by a plan on a GPU; equal to `Links`.

    Args:
        index: PyG's input, for which `fits` is True.
        neg_sampling: Mode and number of negatives; None for none.
        source: Source of the negatives; None for none.
        edges: Pairs that negatives are not; None for none.
        ways: Relations from which the plan excludes the links; see `find_ways`.

    Attributes:
        ends: The links, as seeds of the plan.
    """

    def __init__(self, index: EdgeSamplerInput, parts: Parts, neg_sampling: NegativeSampling | None,
                 source: NegativeSource | None, edges: Edges | None = None, ways: Ways = ()) -> None:  # fmt: skip
        self._index, self._is_hetero, ends = index, parts.is_hetero, _read_ends(parts, index.input_type)
        sources, targets = _check_ends(index, ends)
        self._is_triplet = neg_sampling is not None and neg_sampling.is_triplet()
        more = 0
        if neg_sampling is not None and source is not None:
            check_negatives(index, neg_sampling, source)
            more = math.ceil(sources.numel() * neg_sampling.amount)
        self.ends = Ends(sources, targets, 0 if self._is_triplet else more, more,
                         index.label is None and neg_sampling is not None and not self._is_triplet,
                         types=(ends.source, ends.target), time=index.time,
                         nodes=None if source is None else (source.sources, source.targets),
                         avoided=edges, ways=ways, is_triplet=self._is_triplet)  # fmt: skip

    @staticmethod
    def fits(index: EdgeSamplerInput, source: NegativeSource | None, edges: Edges | None) -> bool:
        """Check if kernels can read the links, and draw negatives from the source (None for no negatives).

        Links on a GPU, and nodes that a program draws, are left to `Links`; no links too, unless other ranks wait for
        them, as with strict negatives of a graph in parts.
        """
        given = index.row, index.col, *(() if index.time is None else (index.time,))
        if any(not isinstance(part, Tensor) or part.dtype != torch.int64 or part.is_cuda for part in given):
            return False
        is_drawn = source is None or not isinstance(source.sources, AskedNodes)
        is_awaited = edges is not None and not isinstance(edges, EdgeSet)
        return (is_drawn and (is_awaited or index.row.numel() > 0)
                and (index.time is None or index.time.dim() in (1, 2)))  # fmt: skip

    def list_excluded(self, ways: Ways) -> Excluded:
        """See `Links.list_excluded`."""
        return _list_by_way(torch.stack([self.ends.sources, self.ends.targets]), ways)

    def finish(self, sample: GeneralSample) -> SamplerOutput | HeteroSamplerOutput:
        """Give a sample PyG's form, with positions, labels and times of the links in its metadata."""
        placed, ends, count = sample.ends, self.ends, self.ends.num_links
        assert placed is not None
        _warn_of_untimely(placed.num_untimely, ends.more_targets)
        _warn_of_edges(placed.num_edges, ends.more_targets)
        out, places = to_general_output(sample, self._is_hetero), placed.places
        if self._is_triplet:
            negatives = places[2 * count :].view(count, ends.more_targets // count if count else 1).squeeze(-1)
            out.metadata = (self._index.input_id, places[:count], places[count : 2 * count], negatives, placed.times)
            return out
        label = self._index.label
        if label is not None:
            if ends.more_sources:
                label = torch.cat([label, label.new_zeros((ends.more_sources, *label.shape[1:]))])
            label = upload(label, places.device)
        elif ends.has_labels:
            label = placed.labels
        out.metadata = (self._index.input_id, places.view(2, -1), label, placed.times)
        return out


class PendingLinks:
    """Pending sample around links. `disjoint`: True if each end has its own tree."""

    def __init__(self, links: Links, sample: Pending | PendingOutput | Finished | Sample, disjoint: bool) -> None:
        self._links, self._sample, self._disjoint = links, sample, disjoint

    @property
    def stream(self) -> Any:
        """The stream on which to call `finish`; None if the sample is complete."""
        return None if isinstance(self._sample, Sample) else self._sample.stream

    @stream.setter
    def stream(self, stream: Any) -> None:
        self._sample.stream = stream  # type: ignore[union-attr]

    def finish(self) -> SamplerOutput | HeteroSamplerOutput:
        """Wait for the sizes of the sample and return PyG's output."""
        sample = self._sample.finish()
        self._links.note_stream()
        if isinstance(sample, Sample):
            self._links.place(sample.n_id[: sample.node_counts[0]])
            return self._links.finish(to_output(sample), self._disjoint)
        self._links.place_in(sample)
        return self._links.finish(to_general_output(sample, self._links.is_hetero), self._disjoint)
