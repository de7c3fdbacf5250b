"""Link ends: the pairs of nodes whose edges a batch leaves out, and links as seeds of a plan on a GPU.

`list_pairs` lists the excluded pairs, such as the links that a batch predicts. `Ends` are links that a plan on a
GPU samples around. Kernels draw their negatives (`LinkInbox`), and find the ends in the batch (`place_ends`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from pyg_direct.graph.hetero_topo import EdgeType, HeteroTopo, PlacedHetero
from pyg_direct.kernels.sampling.link_ends import TABLE, WAY, draw_links_gpu, place_links_gpu
from pyg_direct.ops.rows.upload import upload
from pyg_direct.ops.run_kernel import grid_for, prepare_gpu, run_gpu
from pyg_direct.runtime.cuda.launch import OPEN
from pyg_direct.sampling.negative_links import TRIES, EdgeSet, Nodes

# Sources and targets by relation, ids within their types, int64 `[2, P]`; pairs need not be edges.
Excluded: TypeAlias = Mapping[EdgeType, Tensor]


def list_pairs(topology: PlacedHetero, excluded: Sequence[Excluded]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """List the pairs of several batches on the device that samples, int64 `[P]` each.

    Returns:
        (relation, node that the relation expands, its neighbor in the id space of all types, batch) of each pair;
        relations and batches by number.
    """
    topo, device = topology.topo, topology.device
    relations = {kind: number for number, kind in enumerate(topo.edge_types)}
    parts = [(relations[kind], batch, pairs) for batch, own in enumerate(excluded) for kind, pairs in own.items()
             if kind in relations and pairs.numel()]  # fmt: skip
    if not parts:
        none = torch.empty(0, dtype=torch.int64, device=device)
        return none, none, none, none
    sizes, pairs = [part.shape[1] for *_, part in parts], list[Tensor]()
    numbers, batches = np.array([part[:2] for part in parts], np.int64).T
    own = np.repeat(np.stack([numbers, topo.type_starts[topo.reached[numbers]], batches]), sizes, 1)
    if any(part.is_cuda for *_, part in parts):
        pairs += torch.cat([part.to(device) for *_, part in parts], 1).unbind()
        relation, first, batch = upload(own, device).unbind()
    else:
        # One copy for all.
        words = np.concatenate([own, torch.cat([part for *_, part in parts], 1).numpy()])
        relation, first, batch, *pairs = upload(words, device).unbind()
    expanded, reached = (pairs[1], pairs[0]) if topo.direction == "in" else (pairs[0], pairs[1])
    return relation, expanded, reached + first, batch


class Ends:
    """The ends of links and of their negatives, as seeds of a plan on a GPU.

    Args:
        sources, targets: Nodes at either end of the links, int64 `[L]` on the CPU.
        more_sources, more_targets: Negatives at either end, drawn under the key of the batch as `draw_negatives` does.
        has_labels: True if each pair of a source and a target gets a label.
        types: Node types of either end, for a plan with types; None for the only type.
        time: A time for each link, int64 `[L]`, or a window, `[L, 2]`, on the CPU; None without times.
        nodes: Nodes that negatives are drawn from, at either end, for a plan with types; None without negatives.
        avoided: Pairs that negatives are not, for a plan with types; None for none.
        ways: Relations whose edges of the links are not picked, and True for those with the reverse edges; likewise.
    """

    is_cuda = False

    def __init__(self, sources: Tensor, targets: Tensor, more_sources: int, more_targets: int, has_labels: bool, *,
                 types: tuple[str | None, str | None] = (None, None), time: Tensor | None = None,
                 nodes: tuple[Nodes, Nodes] | None = None, avoided: EdgeSet | None = None,
                 ways: tuple[tuple[EdgeType, bool], ...] = ()) -> None:  # fmt: skip
        self.sources, self.targets = sources, targets
        self.more_sources, self.more_targets, self.has_labels = more_sources, more_targets, has_labels
        self.types, self.time, self.nodes, self.avoided, self.ways = types, time, nodes, avoided, ways
        self.num_links = sources.shape[0]
        self.num_pairs = self.num_links + more_sources
        self._count = self.num_pairs + self.num_links + more_targets

    @property
    def width(self) -> int:
        """Number of times of a link."""
        return 0 if self.time is None else self.time.dim()

    @property
    def is_triplet(self) -> bool:
        """True if only targets have negatives."""
        return self.more_sources < self.more_targets

    def numel(self) -> int:
        """Number of ends."""
        return self._count

    def __getitem__(self, place: int) -> Tensor:
        """Return a given end, by its place among all."""
        return self.sources[place] if place < self.num_links else self.targets[place - self.num_pairs]


def list_ways(topo: HeteroTopo, ways: Sequence[tuple[EdgeType, bool]]) -> np.ndarray:
    """List the words of relations for `find_link_edges_gpu`, int64 `[W, WAY]`."""
    words = [
        (topo.row_starts[number], topo.type_starts[topo.reached[number]], (topo.direction == "in") != is_turned)
        for number, is_turned in ((topo.edge_types.index(kind), is_turned) for kind, is_turned in ways)
    ]
    return np.array(words, np.int64).reshape(-1, WAY)


class PlacedEnds(NamedTuple):
    """Places of the ends of links in a batch.

    Attributes:
        places: Local ids: sources, sources of negatives, targets, targets of negatives; int64 `[n]`. In a batch with
            types, the negatives of a triplet's link are adjacent.
        labels: 1 for given links and 0 for negatives, float32 `[L + negatives]`; empty unless asked for.
        times: Times of the pairs, or of the links of triplets, int64 `[n]` or `[n, 2]`; None without times.
        num_untimely: Negatives with an end that is later than the link.
        num_edges: Negatives that are pairs to avoid, after all tries.
    """

    places: Tensor
    labels: Tensor
    times: Tensor | None = None
    num_untimely: int = 0
    num_edges: int = 0


class LinkInbox:
    """Links of a group of batches on their way to a GPU: a part of an inbox, and the launch that draws negatives.

    Args:
        given: First word of the inbox for them.
        words: The inbox, as NumPy sees it.
        num_batches: Batches of the plan; those after the given ones are empty.
        arrived: All ends, as seeds, and then their times, int64 on the GPU.
    """

    def __init__(self, given: int, words: np.ndarray, inbox: Tensor, num_batches: int, arrived: Tensor) -> None:
        self._given, self._words, self._inbox, self._arrived = given, words, inbox, arrived
        self.table = words[given : given + TABLE * num_batches].reshape(num_batches, TABLE)
        # Options of the batch before, and its launch: those of a loader's batches are the same.
        self._options: tuple[Any, ...] = ()
        self._launch: Any = None

    def draw(self, listed: EndList) -> None:
        """Write links to the inbox, and draw their negatives into `arrived`."""
        words, table, at = self._words, self.table, self._given + self.table.size
        table[:] = 0
        most = 0
        for row, ends in zip(table, listed.requests, strict=False):
            row[:2] = ends.num_links, ends.more_targets
            most += ends.num_links + ends.more_targets
            for part in (ends.sources, ends.targets, ends.time):
                if part is not None:
                    count = part.numel()
                    words[at : at + count] = part.numpy().reshape(-1)
                    at += count
        first = listed.requests[0]
        options = first.nodes, first.avoided, listed.type_numbers, first.width, first.is_triplet
        if options != self._options:
            self._options, self._launch = options, self._prepare(listed, first)
        # The first array names the GPU; the inbox is on the host.
        self._launch(grid_for(most, self._arrived), (self._arrived,))

    def _prepare(self, listed: EndList, first: Ends) -> Any:
        none = self._arrived[:0]
        # Without negatives nothing is drawn.
        tables = (1, none, none, none.double()) * 2 if first.nodes is None else [*first.nodes[0].tables,
                                                                                *first.nodes[1].tables]  # fmt: skip
        avoided = [] if first.avoided is None else first.avoided.parts
        return prepare_gpu(draw_links_gpu, OPEN, self._inbox, self._given, len(self.table), listed.num_types,
                           *listed.type_numbers, first.width, int(first.is_triplet), *tables, TRIES if avoided else 1,
                           *[*avoided, none, none][:2])  # fmt: skip


def place_ends(listed: EndList, number: int, sample: Any, nodes: Tensor, trees: Tensor, arrived: Tensor,
               type_starts: np.ndarray, failures: Sequence[int]) -> PlacedEnds:  # fmt: skip
    """Find the local ids of the ends of a batch of a group.

    Args:
        nodes: Its nodes as ids of the id space, seeds first, int64; unused with trees.
        trees: Trees of all its nodes, int64 on the GPU, which become numbers of links; `[0]` without trees.
        arrived: See `LinkInbox`.
        type_starts: Start of each type in the id space, int64 `[T + 1]`.
    """
    ends, (source, target), disjoint = listed.requests[number], listed.type_numbers, sample.batch is not None
    first, count, width = number * listed.num_types, ends.numel(), ends.width
    source_at, target_at = listed.begins[first + source], listed.begins[first + target]
    own_sources = ends.num_pairs if source == target else 0
    target_at += own_sources
    ranges: Sequence[int] = 0, 0, 0, own_sources, 0, 0
    if not disjoint:
        firsts = [*accumulate(sample.num_seeds.values(), initial=0)]
        ranges = (firsts[source], firsts[source + 1], int(type_starts[source]),
                  firsts[target], firsts[target + 1], int(type_starts[target]))  # fmt: skip
    num_times = width * ends.num_pairs
    places = memory = arrived.new_empty(count + num_times)
    # Empty without times.
    times = arrived[:0]
    if num_times:
        places, times = memory.unsafe_split_with_sizes([count, num_times])
    labels = memory.new_empty(ends.num_pairs if ends.has_labels else 0, dtype=torch.float32)
    times_at = listed.begins[-1] + width * listed.begins[first]
    run_gpu(place_links_gpu, grid_for(max(count + num_times, trees.shape[0]), arrived), nodes, arrived, ends.num_links,
            ends.more_targets, int(ends.is_triplet), source_at, target_at, times_at, *ranges, int(disjoint), trees,
            places, labels, times)  # fmt: skip
    own_times = None if ends.time is None else times.view(-1, 2) if width == 2 else times
    return PlacedEnds(places, labels, own_times, *failures)


class EndList(NamedTuple):
    """Links as a captured plan reads them, in the form of a `SeedList`.

    Attributes:
        requests: The links of each of G batches.
        num_types: Number of node types, T.
        type_numbers: Numbers of the types of sources and of targets.
        counts: Ends of each type of each batch, `G * T`.
        first_trees: Number within its batch of the first tree of these, `G * T`.
        begins: First of these among all ends, and the end of the last, `G * T + 1`.
    """

    requests: Sequence[Ends]
    num_types: int
    type_numbers: tuple[int, int]
    counts: list[int]
    first_trees: list[int]
    begins: list[int]
    most: int

    @classmethod
    def of(cls, topo: HeteroTopo, requests: Sequence[Ends]) -> EndList:
        """List the links of several batches, all between nodes of the same types."""
        num_types = len(topo.node_types)
        source, target = (0 if kind is None else topo.node_types.index(kind) for kind in requests[0].types)
        counts, first_trees = ([0] * (len(requests) * num_types) for _ in range(2))
        for ends, first in zip(requests, range(0, len(counts), num_types), strict=True):
            counts[first + source] = ends.num_pairs
            counts[first + target] += ends.num_links + ends.more_targets
            first_trees[first + target] = 0 if source == target else ends.num_pairs
        most = max(ends.numel() for ends in requests)
        return cls(requests, num_types, (source, target), counts, first_trees, [*accumulate(counts, initial=0)], most)

    @property
    def times(self) -> Tensor | None:
        """Times of the first batch; None if seeds have their own, or none."""
        return self.requests[0].time

    def numel(self) -> int:
        """Number of ends."""
        return self.begins[-1]
