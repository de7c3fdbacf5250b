"""General plan: any number of node types and relations, with PyG's options, hop after hop on any device.

A hop is one work list over all relations (`kernels/sampling/worklist.py`), so the number of kernels does not grow
with the number of relations. On a GPU a captured plan (`hetero_gpu.py`) lists it on the device. On a CPU, and for
graphs in parts, `list_work` makes the list from the numbers of nodes to expand. The host waits for these once a hop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from pyg_direct.compiler.jit import SIMULATED
from pyg_direct.graph.hetero_topo import HeteroTopo, PlacedHetero
from pyg_direct.kernels.sampling.hetero import BY_SEED
from pyg_direct.kernels.sampling.worklist import (
    BATCH,
    BY_PLACE,
    COLUMNS,
    EDGES,
    FANOUT,
    FIRST,
    FLAGS,
    FRONT,
    KEY,
    LOCAL,
    RELATION,
    ROWS,
    SAME_KEYS,
    SHARED,
    SOURCE_BASE,
    SOURCE_START,
    TIMED,
    TYPE_SHIFT,
    WEIGHTED,
)
from pyg_direct.object_text import one_line, show_fanouts
from pyg_direct.ops.argument_checks import check_key
from pyg_direct.ops.local_ids.build_csr import Piece, regroup
from pyg_direct.ops.rows.upload import upload
from pyg_direct.ops.run_kernel import runs_on_gpu, threads_for
from pyg_direct.ops.sampling.sample_hetero import Frontier, PairList, Picked, Rules, find_edges, pick_edges, sort_pairs
from pyg_direct.runtime.host.tensor_views import ordinary_tensors
from pyg_direct.runtime.host.threads import one_thread
from pyg_direct.sampling.captured_plan import Finished, Pending, PendingList, PendingOutput
from pyg_direct.sampling.hetero_gpu import HeteroGpuPlan
from pyg_direct.sampling.hetero_sample import GeneralSample, split_outputs, split_parts
from pyg_direct.sampling.local_ids import Scratch, SortedNumbering, Space, TableNumbering, TorchNumbering, fits_table
from pyg_direct.sampling.sampling_options import GeneralRecipe
from pyg_direct.sampling.seeds import Ends, Excluded, Request, Seeds, list_pairs, read_group


class Layout(Protocol):
    """Places of the rows of a graph: the part of a `HeteroTopo` that a work list reads.

    Attributes:
        expanded, reached: Numbers of the types that each relation expands and leads to, int64 `[R]`.
        row_starts, edge_starts: First row and first edge of each relation, and the ends, int64 `[R + 1]`.
        type_starts: Start of each type in the id space, and the end of the last, int64 `[T + 1]`.
    """

    expanded: np.ndarray
    reached: np.ndarray
    row_starts: np.ndarray
    edge_starts: np.ndarray
    type_starts: np.ndarray


def list_work(topo: Layout, flags: np.ndarray, fanouts: np.ndarray, counts: np.ndarray, known: np.ndarray,
              bases: np.ndarray, key: int) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """(relations with items, the work list) for nodes that stand type after type.

    Args:
        flags: Flags of each relation, int64 `[R]`; BY_PLACE is of a hop.
        fanouts: Fanout of each relation, int64 `[R]`.
        counts: Nodes of each type, int64 `[T]`.
        known: Local id of the first of them, int64 `[T]`.
        bases: Start of each type among the identities, int64 `[T]` at least.
        key: Unsigned 64-bit key of the batch.
    """
    return list_works(topo, flags, fanouts, counts[None], known[None], bases, np.array([key], np.uint64))


def list_works(topo: Layout, flags: np.ndarray, fanouts: np.ndarray, counts: np.ndarray, known: np.ndarray,
               bases: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """As `list_work` for nodes of several batches, batch after batch and type after type within each.

    Args:
        counts, known: As there, for each batch, int64 `[B, T]`.
        bases: As there, or for each batch, int64 `[B, T]`.
        keys: Key of each batch, uint64 `[B]`.

    Returns:
        (batch * R + relation of each entry, the work list).
    """
    items = counts[:, topo.expanded] * (fanouts != 0)
    found = np.flatnonzero(items)
    batches, relations = np.divmod(found, max(1, items.shape[1]))
    work = np.zeros((len(found) + 1, COLUMNS), np.int64)
    entries, expanded, reached = work[:-1], topo.expanded[relations], topo.reached[relations]
    np.cumsum(items.reshape(-1)[found], out=work[1:, FIRST])
    begins = (np.cumsum(counts) - counts.reshape(-1)).reshape(counts.shape)
    entries[:, RELATION], entries[:, FANOUT] = relations, fanouts[relations]
    entries[:, ROWS], entries[:, EDGES] = topo.row_starts[relations], topo.edge_starts[relations]
    entries[:, FRONT], entries[:, LOCAL] = begins[batches, expanded], known[batches, expanded]
    entries[:, FLAGS] = flags[relations]
    entries[:, SOURCE_START] = topo.type_starts[reached]
    entries[:, SOURCE_BASE] = bases[reached] if bases.ndim == 1 else bases[batches, reached]
    entries[:, KEY], entries[:, BATCH] = keys.view(np.int64)[batches], batches
    return found, work.reshape(-1)


class _Hop(NamedTuple):
    """Nodes of a hop, batch after batch and type after type.

    Attributes:
        rows: Ids within the types, int64 `[M]`.
        trees: Trees within the batches, int64 `[M]`; empty if not told apart.
        counts: Number of each type of each batch, int64 `[G * T]`.
        times: Times of the seeds, int64: one for each node, `[M]`, or for one batch one for each tree. `[M, 2]` if
            each seed has two.
    """

    rows: Tensor
    trees: Tensor
    counts: np.ndarray
    times: Tensor


class _Work(NamedTuple):
    """Relations with items in a hop (batch * R + relation), the work list, and the list on the device, if any."""

    relations: np.ndarray
    work: np.ndarray
    entries: Tensor | None


class _Edges(NamedTuple):
    """Edges of a hop, batch after batch and relation after relation: local sources, local targets, ids, numbers."""

    sources: Tensor
    targets: Tensor
    ids: Tensor
    counts: np.ndarray


# Largest table of local ids for a group of batches: one that exceeds the caches is slower than sorting.
_GROUP_TABLE_BYTES = 32 << 20

Numbering = SortedNumbering | TableNumbering | TorchNumbering


class GeneralPlan:
    """Plan that samples batches from a placed `HeteroTopo`; equal keys give equal batches on any device.

    Raises:
        ArgumentError: fanouts that do not fit the relations.
    """

    # Whether all rows are here.
    has_all_rows = True
    # Whether samples in both directions hold the edges they were made from.
    _keeps_sampled = False

    def __init__(self, topology: PlacedHetero, recipe: GeneralRecipe) -> None:
        self.topology, self.recipe = topology, recipe
        topo = topology.topo
        self.fanouts = recipe.table(topo)
        self.disjoint = recipe.disjoint or topo.is_temporal
        window = BY_SEED if recipe.seed_windows else -1 if recipe.time_window is None else recipe.time_window
        self.rules = Rules(recipe.replace, recipe.temporal_strategy == "last", recipe.time_comparison == "<", window)
        weighted = topo.weighted & recipe.weighted
        self.flags = TIMED * topo.timed.astype(np.int64) + WEIGHTED * weighted.astype(np.int64)
        if recipe.sampling == "labor":
            assert not weighted.any() and topo.lists is None, "labor by weight, or of lists in files"
            self.flags += SHARED + SAME_KEYS * recipe.layer_dependency + (topo.reached << TYPE_SHIFT)
        self.rows = topology.with_running_weights() if recipe.replace and weighted.any() else topology.rows
        self._has_table = not self.disjoint and fits_table(int(topo.type_starts[-1]), topology.device)
        if not weighted.any():
            self.rows = self.rows._replace(edge_weight=self.rows.edge_weight[:0])
        self._edges_per_seed = _expect_edges(topo, self.fanouts)
        # By the number of batches that they sample together, whether seeds may repeat, and `ways` of links if any.
        self._captured: dict[tuple[Any, ...], HeteroGpuPlan] = {}
        # Of the largest batch so far: a short one at the end of an epoch is no reason to compile other loops.
        self._most_seeds = self._most_edges = 0

    @property
    def is_captured(self) -> bool:
        """True if batches are sampled by captured plans, which also take links as seeds."""
        return SIMULATED or self.topology.device.type == "cuda"

    @one_line
    def __repr__(self) -> Iterator[str]:
        yield show_fanouts(self.recipe.fanouts)
        yield repr(self.topology)

    def sample(self, seeds: Tensor | Mapping[str, Tensor], key: int, *,
               seed_time: Tensor | Mapping[str, Tensor] | None = None, excluded: Excluded | None = None
               ) -> GeneralSample:  # fmt: skip
        """Sample the batch of `seeds` under `key`.

        Args:
            seeds: int64 or int32 ids within their types, by type; a tensor if there is one type.
            key: Unsigned 64-bit key of its draws.
            seed_time: A time for each seed, integers, in the form of `seeds`; by default the times of the seeds
                themselves. Two for each, `[B, 2]`, if the recipe says so. Without effect on a graph without times.
            excluded: Edges to sample without, as if the graph had none between these pairs.
        """
        return self.sample_together([(seeds, seed_time)], [key], None if excluded is None else [excluded])[0]

    def sample_together(self, requests: Sequence[Request], keys: Sequence[int],
                        excluded: Sequence[Excluded] | None = None) -> list[GeneralSample]:  # fmt: skip
        """Sample several batches in as many steps as one: for each request the result of `sample` under its key.

        Args:
            requests: At least one.
            keys: A key for each.
            excluded: Edges that each is sampled without; None for none.
        """
        if self.is_captured:
            samples: list[GeneralSample] = self.submit_together(requests, keys, excluded).finish()
            return samples
        if self.recipe.subgraph_type == "induced":
            each = [None] * len(keys) if excluded is None else [[own] for own in excluded]
            return [self._sample_all([request], [key], own)[0]
                    for request, key, own in zip(requests, keys, each, strict=True)]  # fmt: skip
        return self._sample_all(requests, keys, excluded)

    def submit_together(self, requests: Sequence[Any], keys: Sequence[int],
                        excluded: Sequence[Excluded] | None = None, *, repeats: bool = False
                        ) -> PendingOutput | Pending | Finished:  # fmt: skip
        """Start to sample several batches; `finish()` of the returned object gives the result of `sample_together`.

        Args:
            repeats: Whether nodes may stand several times among the seeds of a batch, which then are the different
                ones, ascending; unless disjoint.
        """
        repeats = repeats and not self.disjoint
        if not self.is_captured:
            if repeats:
                requests = [(list_different(seeds), times) for seeds, times in requests]
            return Finished(self.sample_together(requests, keys, excluded))
        for key in keys:
            check_key("key", key)
        self.topology.check_process()
        # Batches whose trees are not told apart share a bitmap, and are sampled one after the other.
        size = len(keys) if self.disjoint else 1
        ways = requests[0].ways if isinstance(requests[0], Ends) else ()
        options = (repeats, ways) if ways else (repeats,)
        plan, number = self._captured.get((size, *options)), size
        if plan is None:
            number = min((known for known, *own in self._captured if known >= size and (*own,) == options),
                         default=size)  # fmt: skip
            plan = self._captured.get((number, *options))
        if plan is None:
            all_edges = np.full(len(self.topology.topo.edge_types), -1)
            plan = self._captured[(number, *options)] = HeteroGpuPlan(
                self.topology, self.fanouts, self.rules, self.rows, self.flags, disjoint=self.disjoint,
                repeats=repeats, num_batches=number, max_degree=self.recipe.max_degree,
                last_fanouts=all_edges if self.recipe.subgraph_type == "induced" else None, ways=ways)  # fmt: skip
        pending = []
        for first in range(0, len(keys), size):
            own = slice(first, first + size)
            without = None if excluded is None else self._sort_excluded(excluded[own])
            pending.append(plan.submit(requests[own], keys[own], without))
        return self._join(pending)

    def _join(self, pending: Sequence[Pending]) -> PendingOutput | Pending:
        """Join batches that were enqueued one after the other, in both directions if the recipe says so."""
        joined = pending[0] if len(pending) == 1 else PendingOutput(PendingList(pending), _list_samples)
        is_turned = self.recipe.subgraph_type == "bidirectional"
        return PendingOutput(joined, self._turn_all) if is_turned else joined

    def _sample_all(self, requests: Sequence[Request], keys: Sequence[int], excluded: Sequence[Excluded] | None
                    ) -> list[GeneralSample]:  # fmt: skip
        if torch.is_inference_mode_enabled():
            with ordinary_tensors():
                return self._sample_all(requests, keys, excluded)
        for key in keys:
            check_key("key", key)
        self.topology.check_process()
        start = read_group(self.topology, requests, self.disjoint, 2 if self.recipe.seed_windows else 1)
        if excluded is not None:
            start = start._replace(excluded=self._find_excluded(excluded))
        if self.topology.device.type == "cuda":
            return self._sample_in(start, np.array(keys, np.uint64))
        num_seeds, most_edges = start.rows.numel(), self._most_edges
        if num_seeds > self._most_seeds:
            # Until it is known, as many as there could be.
            self._most_seeds, most_edges = num_seeds, num_seeds * self._edges_per_seed
        # Torch's other threads would go on waiting awake beside loops of ours.
        with threads_for(most_edges), one_thread():
            samples = self._sample_in(start, np.array(keys, np.uint64))
        num_edges = sum(pair.shape[1] for sample in samples for pair in sample.edge_index.values())
        self._most_edges = max(self._most_edges, num_edges)
        return samples

    def _turn_all(self, samples: list[GeneralSample]) -> list[GeneralSample]:
        return [self._turn_both_ways(sample) for sample in samples]

    def _turn_both_ways(self, sample: GeneralSample) -> GeneralSample:
        """Return the sample with its edges in both directions, if the recipe says so."""
        if self.recipe.subgraph_type != "bidirectional":
            return sample
        has_ids = self.topology.topo.is_homogeneous
        return sample.to_bidirectional(keep_ids=has_ids, keep_sampled=has_ids and self._keeps_sampled)

    def _sample_in(self, start: Seeds, keys: np.ndarray) -> list[GeneralSample]:
        """Travel at once: the bases of the identities, the places of the seeds and the first work list."""
        bases, counts = start.bases, start.counts
        listed = self._list_work(0, counts, np.zeros_like(counts), start, keys)
        # Seeds of one type stand in the order of their trees, whose times are theirs then.
        is_in_order = bool(((counts.reshape(len(keys), -1) > 0).sum(1) <= 1).all())
        trees = counts[:0] if is_in_order else self._list_trees(start, counts)
        words = np.concatenate([bases, np.cumsum(counts) - counts, np.zeros_like(counts), listed.work, trees])
        sizes = [len(bases), 2 * len(counts), len(listed.work), len(trees)]
        table, places, entries, of_batches = split_parts(upload(words, self.topology.device), sizes)
        first = _Hop(start.rows, start.trees, counts, _find_times(start, start.trees, of_batches))
        listed, space = listed._replace(entries=entries), Space(table, start.tree_shift, start.tree_bits)
        num_ids = int(bases[-1])
        if runs_on_gpu(table) or not self._has_table or (len(keys) > 1 and 4 * num_ids > _GROUP_TABLE_BYTES):
            by_order = (TorchNumbering if runs_on_gpu(table) else SortedNumbering)(space)
            by_order.start(start.identities, counts)
            return self._sample(start, keys, by_order, first, listed)
        try:
            scratch = self.topology.scratch.pop()
        except IndexError:
            scratch = Scratch(num_ids)
        if scratch.local_of_id.numel() < num_ids:
            scratch = Scratch(num_ids)
        by_table = TableNumbering(space, scratch.cut(num_ids))
        by_table.start(start.identities, counts, places)
        samples = self._sample(start, keys, by_table, first, listed)
        # After an error it is not empty, and goes.
        by_table.close()
        self.topology.scratch.append(scratch)
        return samples

    def _list_work(self, hop: int, counts: np.ndarray, known: np.ndarray, start: Seeds, keys: np.ndarray) -> _Work:
        """Make the work list of a hop; empty behind the last."""
        if hop >= len(self.fanouts):
            return _Work(np.zeros(0, np.int64), np.zeros(0, np.int64), None)
        counts, known, bases = (part.reshape(len(keys), -1) for part in (counts, known, start.bases[:-1]))
        flags = self.flags if len(keys) == 1 else self.flags + BY_PLACE * self.topology.topo.timed
        return _Work(*list_works(self.topology.topo, flags, self.fanouts[hop], counts, known, bases, keys), None)

    def _list_trees(self, start: Seeds, counts: np.ndarray) -> np.ndarray:
        """List the first tree of each batch, and its number of nodes of a hop, int64 `[2 G]`; empty if times are found
        by tree."""
        num_batches = len(start.first_trees)
        if num_batches == 1 or not self.topology.topo.is_temporal:
            return counts[:0]
        return np.concatenate([start.first_trees, counts.reshape(num_batches, -1).sum(1)])

    def _sample(self, start: Seeds, keys: np.ndarray, numbering: Numbering, first: _Hop, listed: _Work
                ) -> list[GeneralSample]:  # fmt: skip
        hops, edges = [first], []
        known = start.counts
        for hop in range(len(self.fanouts)):
            relations = listed.relations
            picked = self._pick(listed, hops[-1], start, keys, hop)
            new_counts = numbering.enter(picked.sources, picked.ends)
            # The one wait of the hop.
            words = np.array(torch.cat([picked.ends, new_counts]).tolist(), dtype=np.int64)
            ends, of_type = words[: len(relations) + 1], words[len(relations) + 2 :]
            total = int(ends[-1])
            # The arrays that this hop still needs travel with the work list of the next.
            listed = self._list_work(hop + 1, of_type, known, start, keys)
            is_last = hop + 1 == len(self.fanouts)
            parts = [numbering.list_places(of_type), listed.work,
                     of_type[:0] if is_last else self._list_trees(start, of_type)]  # fmt: skip
            words_there = upload(np.concatenate(parts), self.topology.device)
            places, entries, of_batches = split_parts(words_there, [len(part) for part in parts])
            listed, known = listed._replace(entries=entries), known + of_type
            rows, trees, sources = numbering.settle(total, of_type, places)
            edges.append(_Edges(sources, picked.targets[:total], picked.ids[:total],
                                self._by_relation(relations, np.diff(ends), len(keys))))  # fmt: skip
            # The times of the last hop are unused.
            hops.append(_Hop(rows, trees, of_type, start.times if is_last else _find_times(start, trees, of_batches)))
        samples = self._collect(hops, edges, len(keys))
        if self.recipe.subgraph_type == "induced":
            return [self._induce(samples[0], start, keys, numbering)]
        return [self._turn_both_ways(sample) for sample in samples]

    def _find_excluded(self, excluded: Sequence[Excluded]) -> Any:
        """Find the edges between pairs of each batch, for `_pick`."""
        return find_edges(self.rows, self._sort_excluded(excluded))

    def _sort_excluded(self, excluded: Sequence[Excluded]) -> PairList:
        """Sort the pairs of each batch whose edges are not picked."""
        relations, *ends, batches = list_pairs(self.topology, excluded)
        firsts = upload(np.stack([self.topology.topo.row_starts[:-1]]), self.topology.device)[0]
        return sort_pairs(self.rows, firsts[relations] + ends[0], ends[1], batches)

    def _pick(self, listed: _Work, front: _Hop, start: Seeds, keys: np.ndarray, hop: int) -> Picked:
        if listed.work[-COLUMNS] == 0:
            none = front.rows[:0]
            return Picked(none, none, none, none.new_zeros(1))
        frontier = Frontier(front.rows, front.trees, front.times.view(-1), start.tree_shift)
        picked = pick_edges(self.rows, listed.work, frontier, self.rules, hop=hop, entries=listed.entries,
                            excluded=start.excluded, lists=self.topology.topo.lists)  # fmt: skip
        self.topology.check_neighbors(picked.ids)
        return picked

    def _by_relation(self, relations: np.ndarray, counts: np.ndarray, num_batches: int = 1) -> np.ndarray:
        by_relation = np.zeros(num_batches * len(self.topology.topo.edge_types), np.int64)
        by_relation[relations] = counts
        return by_relation

    def _collect(self, hops: list[_Hop], edges: list[_Edges], num_batches: int = 1) -> list[GeneralSample]:
        """Collect the batches, whose types and relations all share memory."""
        topo = self.topology.topo
        num_relations = len(topo.edge_types)
        node_counts = np.stack([hop.counts for hop in hops])
        num_edges = np.array([e.counts for e in edges], np.int64).reshape(len(edges), num_batches * num_relations)
        by_type, by_relation = node_counts.sum(0), num_edges.sum(0)
        num_nodes, new = int(by_type.sum()), hops[0].rows.new_empty
        # The sources and then the targets of a relation; a pair without edges has a place too, by which it is known.
        pair_sizes = 2 * np.maximum(by_relation, 1)
        outputs = (new(num_nodes * (2 if self.disjoint else 1)), new(int(pair_sizes.sum())),
                   new(int(by_relation.sum())))  # fmt: skip
        pieces = []
        for hop, places in zip(hops, _list_places(node_counts, by_type), strict=True):
            pieces += [Piece(hop.rows, hop.counts, places, 0), Piece(hop.trees, hop.counts, places + num_nodes, 0)]
        first, second = (0, by_relation) if topo.direction == "in" else (by_relation, 0)
        pairs, ids = (_list_places(num_edges, sizes) for sizes in (pair_sizes, by_relation))
        for own, to_pair, to_id in zip(edges, pairs, ids, strict=True):
            pieces += [Piece(own.sources, own.counts, to_pair + first, 1),
                       Piece(own.targets, own.counts, to_pair + second, 1),
                       Piece(own.ids, own.counts, to_id, 2)]  # fmt: skip
        regroup(pieces, outputs)
        return split_outputs(topo, outputs, node_counts, num_edges, num_batches, self.disjoint, self.recipe.max_degree)

    def _induce(self, sample: GeneralSample, start: Seeds, keys: np.ndarray, numbering: Numbering) -> GeneralSample:
        """All allowed edges among the nodes of a sample."""
        topo = self.topology.topo
        counts = np.array([sample.node[kind].numel() for kind in topo.node_types], dtype=np.int64)
        rows = torch.cat(list(sample.node.values())) if topo.node_types else start.rows
        trees = torch.cat(list(sample.batch.values())) if sample.batch else rows[:0]
        all_neighbors = np.full(len(topo.edge_types), -1)
        relations, work = list_work(topo, self.flags, all_neighbors, counts, np.zeros_like(counts), start.bases, 0)
        front = _Hop(rows, trees, counts, start.times)
        picked = self._pick(_Work(relations, work, None), front, start, np.zeros_like(keys), len(self.fanouts))
        sources = numbering.find(picked.sources)
        is_inside = sources >= 0
        kept = np.array(torch.cat([picked.ends[:1], is_inside.cumsum(0)])[picked.ends].diff().tolist(), dtype=np.int64)
        whole = _Edges(sources[is_inside], picked.targets[is_inside], picked.ids[is_inside],
                       self._by_relation(relations, kept))  # fmt: skip
        (induced,) = self._collect([front], [whole])
        induced.num_sampled_nodes = induced.num_sampled_edges = None
        induced.num_seeds = sample.num_seeds
        return induced


def _list_samples(groups: Sequence[list[GeneralSample]]) -> list[GeneralSample]:
    """List the samples of groups of batches one after the other."""
    return [*chain.from_iterable(groups)]


def list_different(seeds: Tensor | Mapping[str, Tensor]) -> Tensor | dict[str, Tensor]:
    """List the different nodes among seeds, ascending."""
    if isinstance(seeds, Tensor):
        return seeds.unique()
    return {kind: own.unique() for kind, own in seeds.items()}


def _list_places(counts: np.ndarray, room: np.ndarray) -> np.ndarray:
    """List the places of the items of each hop and type, kept by type and hop after hop, int64 `[H, T]`.

    Args:
        counts: Items by hop and type, int64 `[H, T]`.
        room: Items that each type has room for, int64 `[T]`.
    """
    return np.cumsum(counts, 0) - counts + (np.cumsum(room) - room)


def _find_times(start: Seeds, trees: Tensor, of_batches: Tensor) -> Tensor:
    """Times of the seeds of nodes in these trees; of each tree if `of_batches` is empty (see `_list_trees`)."""
    if of_batches.numel() == 0:
        return start.times
    first, counts = of_batches.view(2, -1)
    places = first.repeat_interleave(counts, output_size=trees.numel()).add_(trees)
    return start.times.index_select(0, places)


def _expect_edges(topo: HeteroTopo, fanouts: np.ndarray) -> int:
    """Count the edges of a batch for each of its seeds, if every node has as many neighbors as its fanout."""
    num_rows = np.maximum(np.diff(topo.row_starts), 1)
    mean_degrees = -(-np.diff(topo.edge_starts) // num_rows)
    frontier, edges = 1, 0
    for of_hop in fanouts:
        picks = np.where(of_hop < 0, mean_degrees, of_hop)
        # As if all nodes were of the type with the most neighbors; in Python's integers, which do not overflow.
        frontier *= int(max((picks[topo.expanded == kind].sum() for kind in set(topo.expanded.tolist())), default=0))
        edges += frontier
    return edges
