"""The general plan: any number of node types and relations, with PyG's options, hop after hop on any device.

A hop is one work list over all relations (`kernels/worklist.py`), so that the number of kernels does not grow with
their number.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_direct.graph.hetero import HeteroTopo, PlacedHetero
from pyg_direct.kernels.worklist import COLUMNS, TIMED, WEIGHTED
from pyg_direct.ops.check import check_key
from pyg_direct.ops.general import Frontier, Move, Picked, Rules, move_segments, pick_edges
from pyg_direct.ops.launch import threads_for
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
        space = Space(upload(start.bases, self.topology.device), start.tree_shift, start.tree_bits)
        self._most_seeds = max(self._most_seeds, start.rows.numel())
        is_on_gpu = self.topology.device.type == "cuda"
        with nullcontext() if is_on_gpu else threads_for(self._most_seeds * self._edges_per_seed):
            return self._sample_in(space, start, key)

    def _sample_in(self, space: Space, start: Seeds, key: int) -> GeneralSample:
        if not self._has_table:
            numbering = HashNumbering(space, self._num_slots)
            sample = self._sample(start, key, numbering)
            self._num_slots = max(self._num_slots, numbering.num_slots)
            return sample
        try:
            scratch = self.topology.scratch.pop()
        except IndexError:
            scratch = Scratch(int(self.topology.topo.type_starts[-1]), self.topology.device)
        table = TableNumbering(space, scratch)
        sample = self._sample(start, key, table)
        # After an error it is not empty, and goes.
        table.close()
        self.topology.scratch.append(scratch)
        return sample

    def _sample(self, start: Seeds, key: int, numbering: Numbering) -> GeneralSample:
        topo = self.topology.topo
        hops, edges = [_Hop(start.rows, start.trees, start.counts)], []
        numbering.start(start.identities, start.counts)
        known = np.zeros_like(start.counts)
        for hop in range(len(self._fanouts)):
            front = hops[-1]
            relations, work = list_work(topo, self.flags, self._fanouts[hop], front.counts, known, start.bases, key)
            known = known + front.counts
            picked = self._pick(work, front, start, key, hop)
            new_counts = numbering.enter(picked.sources, picked.ends)
            # The one wait of the hop.
            words = np.array(torch.cat([picked.ends, new_counts]).tolist(), dtype=np.int64)
            ends, of_type = words[: len(relations) + 1], words[len(relations) + 2 :]
            total = int(ends[-1])
            rows, trees, sources = numbering.settle(total, of_type)
            edges.append(_Edges(sources, picked.targets[:total], picked.ids[:total],
                                self._by_relation(relations, np.diff(ends))))  # fmt: skip
            hops.append(_Hop(rows, trees, of_type))
        sample = self._collect(hops, edges)
        if self.recipe.subgraph_type == "bidirectional":
            return sample.to_bidirectional(keep_ids=self.topology.topo.is_homogeneous)
        if self.recipe.subgraph_type == "induced":
            return self._induce(sample, start, numbering)
        return sample

    def _pick(self, work: np.ndarray, front: _Hop, start: Seeds, key: int, hop: int) -> Picked:
        if work[-COLUMNS] == 0:
            none = front.rows[:0]
            return Picked(none, none, none, none.new_zeros(1))
        frontier = Frontier(front.rows, front.trees, start.times, start.tree_shift)
        return pick_edges(self.rows, work, frontier, self.rules, hop=hop)

    def _by_relation(self, relations: np.ndarray, counts: np.ndarray) -> np.ndarray:
        by_relation = np.zeros(len(self.topology.topo.edge_types), np.int64)
        by_relation[relations] = counts
        return by_relation

    def _collect(self, hops: list[_Hop], edges: list[_Edges]) -> GeneralSample:
        topo = self.topology.topo
        node_counts = np.stack([hop.counts for hop in hops])
        num_edges = np.stack([e.counts for e in edges]) if edges else np.zeros((0, len(topo.edge_types)), np.int64)
        none = hops[0].rows[:0]
        (rows, trees), moves = _regroup([[hop.rows, hop.trees] for hop in hops], node_counts)
        sources = targets = ids = none
        if edges:
            (sources, targets, ids), more = _regroup([[e.sources, e.targets, e.ids] for e in edges], num_edges)
            moves += more
        move_segments(moves)
        if topo.direction == "out":
            sources, targets = targets, sources
        by_type = node_counts.sum(0).tolist()
        by_relation = num_edges.sum(0).tolist()
        return GeneralSample(
            node=split_by(topo.node_types, rows, by_type),
            row=split_by(topo.edge_types, sources, by_relation),
            col=split_by(topo.edge_types, targets, by_relation),
            edge=dict(split_by(topo.edge_types, ids, by_relation)),
            batch=split_by(topo.node_types, trees, by_type) if self.disjoint else None,
            num_sampled_nodes=dict(zip(topo.node_types, node_counts.T.tolist(), strict=True)),
            num_sampled_edges=dict(zip(topo.edge_types, num_edges.T.tolist(), strict=True)),
        )

    def _induce(self, sample: GeneralSample, start: Seeds, numbering: Numbering) -> GeneralSample:
        """All allowed edges among the nodes of a sample."""
        topo = self.topology.topo
        counts = np.array([sample.node[kind].numel() for kind in topo.node_types], dtype=np.int64)
        rows = torch.cat(list(sample.node.values())) if topo.node_types else start.rows
        trees = torch.cat(list(sample.batch.values())) if sample.batch else rows[:0]
        all_neighbors = np.full(len(topo.edge_types), -1)
        relations, work = list_work(topo, self.flags, all_neighbors, counts, np.zeros_like(counts), start.bases, 0)
        picked = self._pick(work, _Hop(rows, trees, counts), start, 0, 0)
        sources = numbering.find(picked.sources)
        is_inside = sources >= 0
        kept = np.array(torch.cat([picked.ends[:1], is_inside.cumsum(0)])[picked.ends].diff().tolist(), dtype=np.int64)
        whole = _Edges(sources[is_inside], picked.targets[is_inside], picked.ids[is_inside],
                       self._by_relation(relations, kept))  # fmt: skip
        induced = self._collect([_Hop(rows, trees, counts)], [whole])
        induced.num_sampled_nodes = induced.num_sampled_edges = None
        return induced


def _regroup(pieces: list[list[Tensor]], counts: np.ndarray) -> tuple[list[Tensor], list[Move]]:
    """Arrays by hop, type after type within each, as arrays by type, hop after hop within each; what is left to move.

    Args:
        pieces: For each hop, its arrays, of one length; later ones may be empty.
        counts: Items by hop and type, int64 `[H, T]`.
    """
    if len(pieces) == 1 or counts.shape[1] == 1:
        return [torch.cat(arrays) for arrays in zip(*pieces, strict=True)], []
    totals = counts.sum(0)
    total = int(totals.sum())
    out = [pieces[0][0].new_empty(total if any(p[i].numel() for p in pieces) else 0) for i in range(len(pieces[0]))]
    # Where each type begins, then after its items of the hops so far.
    places = np.cumsum(totals) - totals
    moves = []
    for arrays, own in zip(pieces, counts, strict=True):
        begins = np.concatenate([[0], np.cumsum(own)])
        moves.append(Move(begins, places - begins[:-1], arrays, out))
        places = places + own
    return out, moves


def split_by(names: tuple, array: Tensor, sizes: list[int]) -> dict:  # type: ignore[type-arg]
    """Parts of an array that stand one after the other, by name."""
    return dict(zip(names, array.split(sizes), strict=True)) if names else {}


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
