"""The general plan: any number of node types and relations, with PyG's options, hop after hop on any device.

A hop is one work list over all relations (`kernels/worklist.py`), so that the number of kernels does not grow with
their number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_direct.graph.hetero import HeteroTopo, PlacedHetero
from pyg_direct.kernels.worklist import COLUMNS, TIMED, WEIGHTED
from pyg_direct.ops.check import check_key
from pyg_direct.ops.general import Frontier, Picked, Rows, Rules, pick_edges
from pyg_direct.ops.launch import runs_on_gpu, threads_for
from pyg_direct.ops.regroup import Piece, regroup
from pyg_direct.ops.upload import upload
from pyg_direct.runtime.mode import ordinary_tensors
from pyg_direct.sampling.hashed import SMALLEST_TABLE, HashNumbering
from pyg_direct.sampling.numbering import Space
from pyg_direct.sampling.options import GeneralRecipe
from pyg_direct.sampling.seeds import Seeds, read_seeds
from pyg_direct.sampling.subgraph import GeneralSample
from pyg_direct.sampling.tabled import Scratch, TableNumbering, fits_table
from pyg_direct.sampling.worklist import list_work


class _Hop(NamedTuple):
    """Nodes of a hop, type after type: ids within the types, trees (empty where not told apart), number by type."""

    rows: Tensor
    trees: Tensor
    counts: np.ndarray


class _Work(NamedTuple):
    """Relations with items in a hop, the work list, and that on the device where it is there already."""

    relations: np.ndarray
    work: np.ndarray
    entries: Tensor | None


class _Edges(NamedTuple):
    """Edges of a hop, relation after relation: local sources, local targets, ids, number by relation."""

    sources: Tensor
    targets: Tensor
    ids: Tensor
    counts: np.ndarray


Numbering = HashNumbering | TableNumbering


class GeneralPlan:
    """Samples batches from a placed `HeteroTopo`; equal keys give equal batches on any device.

    Raises:
        ArgumentError: fanouts that do not fit the relations.
    """

    def __init__(self, topology: PlacedHetero, recipe: GeneralRecipe) -> None:
        self.topology, self.recipe = topology, recipe
        topo = topology.topo
        self._fanouts = recipe.table(topo)
        self.disjoint = recipe.disjoint or topo.is_temporal
        window = -1 if recipe.time_window is None else recipe.time_window
        self.rules = Rules(recipe.replace, recipe.temporal_strategy == "last", recipe.time_comparison == "<", window)
        weighted = topo.weighted & recipe.weighted
        self.flags = TIMED * topo.timed.astype(np.int64) + WEIGHTED * weighted.astype(np.int64)
        self.rows = topology.with_running_weights() if recipe.replace and weighted.any() else topology.rows
        self._has_table = not self.disjoint and fits_table(int(topo.type_starts[-1]), topology.device)
        # Size of the hash table; the largest that a batch needed so far.
        self._num_slots = SMALLEST_TABLE
        if not weighted.any():
            self.rows = self.rows._replace(edge_weight=self.rows.edge_weight[:0])
        self._edges_per_seed = _expect_edges(topo, self._fanouts)
        # Of a row of each relation; found when it is first needed.
        self._most_neighbors: np.ndarray | None = None
        # The largest batch so far: a short one at the end of an epoch is no reason to compile other loops.
        self._most_seeds = 0

    @ordinary_tensors()
    def sample(self, seeds: Tensor | Mapping[str, Tensor], key: int, *,
               seed_time: Tensor | Mapping[str, Tensor] | None = None) -> GeneralSample:  # fmt: skip
        """The batch of `seeds` under `key`.

        Args:
            seeds: int64 or int32 ids within their types, by type; a tensor where there is one type.
            key: Unsigned 64-bit key of its draws.
            seed_time: A time for each seed, integers, in the form of `seeds`; by default the times of the seeds
                themselves. Without effect on a graph without times.

        Raises:
            ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
        """
        check_key("key", key)
        self.topology.check_process()
        start = read_seeds(self.topology, seeds, seed_time, self.disjoint)
        self._most_seeds = max(self._most_seeds, start.rows.numel())
        is_on_gpu = self.topology.device.type == "cuda"
        with nullcontext() if is_on_gpu else threads_for(self._most_seeds * self._edges_per_seed):
            return self._sample_in(start, key)

    def _sample_in(self, start: Seeds, key: int) -> GeneralSample:
        """Travel at once: the bases of the identities, the places of the seeds and the first work list."""
        bases, counts = start.bases, start.counts
        listed = self._list_work(0, counts, np.zeros_like(counts), start, key)
        words = np.concatenate([bases, np.cumsum(counts) - counts, np.zeros_like(counts), listed.work])
        table, places, entries = _split(upload(words, self.topology.device),
                                        [len(bases), 2 * len(counts), len(listed.work)])  # fmt: skip
        listed, space = listed._replace(entries=entries), Space(table, start.tree_shift, start.tree_bits)
        if not self._has_table:
            numbering = HashNumbering(space, self._num_slots)
            numbering.start(start.identities, counts, places)
            sample = self._sample(start, key, numbering, listed)
            self._num_slots = max(self._num_slots, numbering.num_slots)
            return sample
        try:
            scratch = self.topology.scratch.pop()
        except IndexError:
            scratch = Scratch(int(self.topology.topo.type_starts[-1]), self.topology.device)
        by_table = TableNumbering(space, scratch)
        by_table.start(start.identities, counts, places)
        sample = self._sample(start, key, by_table, listed)
        # After an error it is not empty, and goes.
        by_table.close()
        self.topology.scratch.append(scratch)
        return sample

    def _list_work(self, hop: int, counts: np.ndarray, known: np.ndarray, start: Seeds, key: int) -> _Work:
        """The work list of a hop; empty behind the last."""
        if hop >= len(self._fanouts):
            return _Work(np.zeros(0, np.int64), np.zeros(0, np.int64), None)
        topo, fanouts = self.topology.topo, self._fanouts[hop]
        return _Work(*list_work(topo, self.flags, fanouts, counts, known, start.bases, key), None)

    def _sample(self, start: Seeds, key: int, numbering: Numbering, listed: _Work) -> GeneralSample:
        hops, edges = [_Hop(start.rows, start.trees, start.counts)], []
        known = start.counts
        for hop in range(len(self._fanouts)):
            relations = listed.relations
            picked = self._pick(listed, hops[-1], start, key, hop)
            new_counts = numbering.enter(picked.sources, picked.ends)
            # The one wait of the hop.
            words = np.array(torch.cat([picked.ends, new_counts]).tolist(), dtype=np.int64)
            ends, of_type = words[: len(relations) + 1], words[len(relations) + 2 :]
            total = int(ends[-1])
            # What this hop still needs travels with the work list of the next.
            listed = self._list_work(hop + 1, of_type, known, start, key)
            to_settle = numbering.list_places(of_type)
            places, entries = _split(upload(np.concatenate([to_settle, listed.work]), self.topology.device),
                                     [len(to_settle), len(listed.work)])  # fmt: skip
            listed, known = listed._replace(entries=entries), known + of_type
            rows, trees, sources = numbering.settle(total, of_type, places)
            edges.append(_Edges(sources, picked.targets[:total], picked.ids[:total],
                                self._by_relation(relations, np.diff(ends))))  # fmt: skip
            hops.append(_Hop(rows, trees, of_type))
        sample = self._collect(hops, edges)
        if self.recipe.subgraph_type == "bidirectional":
            return sample.to_bidirectional(keep_ids=self.topology.topo.is_homogeneous)
        if self.recipe.subgraph_type == "induced":
            return self._induce(sample, start, numbering)
        return sample

    def _pick(self, listed: _Work, front: _Hop, start: Seeds, key: int, hop: int) -> Picked:
        if listed.work[-COLUMNS] == 0:
            none = front.rows[:0]
            return Picked(none, none, none, none.new_zeros(1))
        frontier = Frontier(front.rows, front.trees, start.times, start.tree_shift)
        if self._most_neighbors is None and runs_on_gpu(front.rows):
            self._most_neighbors = _find_most_neighbors(self.topology.topo, self.rows)
        return pick_edges(self.rows, listed.work, frontier, self.rules, hop=hop, entries=listed.entries,
                          most_neighbors=self._most_neighbors)  # fmt: skip

    def _by_relation(self, relations: np.ndarray, counts: np.ndarray) -> np.ndarray:
        by_relation = np.zeros(len(self.topology.topo.edge_types), np.int64)
        by_relation[relations] = counts
        return by_relation

    def _collect(self, hops: list[_Hop], edges: list[_Edges]) -> GeneralSample:
        topo = self.topology.topo
        node_counts = np.stack([hop.counts for hop in hops])
        num_edges = np.stack([e.counts for e in edges]) if edges else np.zeros((0, len(topo.edge_types)), np.int64)
        by_type, by_relation = node_counts.sum(0), num_edges.sum(0)
        num_nodes, new = int(by_type.sum()), hops[0].rows.new_empty
        # The pair of a relation without edges has a place of its own too, by which it is known.
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
        nodes, ends, edge_ids = outputs
        sizes = by_type.tolist()
        parts = _split(nodes, sizes * 2 if self.disjoint else sizes)
        pairs_of = zip(topo.edge_types, _split(ends, pair_sizes.tolist()), by_relation.tolist(), strict=True)
        links = {kind: _as_pair(pair, size) for kind, pair, size in pairs_of}
        return GeneralSample(
            node=dict(zip(topo.node_types, parts, strict=False)),
            edge_index=links,
            edge=dict(zip(topo.edge_types, _split(edge_ids, by_relation.tolist()), strict=True)),
            batch=dict(zip(topo.node_types, parts[len(sizes) :], strict=True)) if self.disjoint else None,
            num_sampled_nodes=dict(zip(topo.node_types, node_counts.T.tolist(), strict=True)),
            num_sampled_edges=dict(zip(topo.edge_types, num_edges.T.tolist(), strict=True)),
            memory=outputs,
        )

    def _induce(self, sample: GeneralSample, start: Seeds, numbering: Numbering) -> GeneralSample:
        """All allowed edges among the nodes of a sample."""
        topo = self.topology.topo
        counts = np.array([sample.node[kind].numel() for kind in topo.node_types], dtype=np.int64)
        rows = torch.cat(list(sample.node.values())) if topo.node_types else start.rows
        trees = torch.cat(list(sample.batch.values())) if sample.batch else rows[:0]
        all_neighbors = np.full(len(topo.edge_types), -1)
        relations, work = list_work(topo, self.flags, all_neighbors, counts, np.zeros_like(counts), start.bases, 0)
        picked = self._pick(_Work(relations, work, None), _Hop(rows, trees, counts), start, 0, 0)
        sources = numbering.find(picked.sources)
        is_inside = sources >= 0
        kept = np.array(torch.cat([picked.ends[:1], is_inside.cumsum(0)])[picked.ends].diff().tolist(), dtype=np.int64)
        whole = _Edges(sources[is_inside], picked.targets[is_inside], picked.ids[is_inside],
                       self._by_relation(relations, kept))  # fmt: skip
        induced = self._collect([_Hop(rows, trees, counts)], [whole])
        induced.num_sampled_nodes = induced.num_sampled_edges = None
        return induced


def _list_places(counts: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Where the items of each hop and type stand when they are kept by type, hop after hop, int64 `[H, T]`.

    Args:
        counts: Items by hop and type, int64 `[H, T]`.
        room: Items that each type has room for, int64 `[T]`.
    """
    return np.cumsum(counts, 0) - counts + (np.cumsum(room) - room)


def _split(array: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    """Parts of an array that stand one after the other; torch counts writes to each on its own."""
    return torch.unsafe_split_with_sizes(array, sizes) if sizes else ()


def _as_pair(ends: Tensor, num_edges: int) -> Tensor:
    """`[2, E']` of sources and then targets; without edges there is room for one."""
    return ends.view(2, -1) if num_edges > 0 else ends[:0].view(2, 0)


def split_by(names: tuple, array: Tensor, sizes: list[int], dim: int = 0) -> dict:  # type: ignore[type-arg]
    """Parts of an array that stand one after the other along a dimension, by name."""
    return dict(zip(names, array.split(sizes, dim), strict=True)) if names else {}


def _find_most_neighbors(topo: HeteroTopo, rows: Rows) -> np.ndarray:
    """The most neighbors that a row of each relation has, int64 `[R]`."""
    starts = topo.row_starts.tolist()
    assert rows.indptr.numel() == starts[-1] + 1, "rows of a part of the graph"
    most = [rows.indptr[begin : end + 1].diff().max() if begin < end else rows.indptr.new_zeros(())
            for begin, end in pairwise(starts)]  # fmt: skip
    return np.array(torch.stack(most).tolist() if most else [], dtype=np.int64)


def _expect_edges(topo: HeteroTopo, fanouts: np.ndarray) -> int:
    """Edges of a batch for each of its seeds, where every node has as many neighbors as are asked for."""
    num_rows = np.maximum(np.diff(topo.row_starts), 1)
    mean_degrees = -(-np.diff(topo.edge_starts) // num_rows)
    frontier, edges = 1, 0
    for of_hop in fanouts:
        picks = np.where(of_hop < 0, mean_degrees, of_hop)
        # As if all nodes were of the type with the most neighbors; in Python's integers, which do not overflow.
        frontier *= int(max((picks[topo.expanded == kind].sum() for kind in set(topo.expanded.tolist())), default=0))
        edges += frontier
    return edges
