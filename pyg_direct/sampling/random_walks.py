"""Random walks over a topology that is placed once: `random_walk`, and walks along relations (`MetapathWalks`).

Neighborhoods by personalised PageRank (`PPRPlan`) are the nodes that walks with restart from a seed are at most often.
A walk that restarts with chance `alpha` before each step is at its step k with chance alpha (1 - alpha)^k. So fixed
walks from a seed estimate its PageRank when each step counts by that chance (Avrachenkov et al., SIAM J. Numer. Anal.
2007, the complete path); the last step takes the rest. Chances are integers of 2**-20, and sums of them exact, so
that equal keys give equal neighborhoods on every device.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.graph.hetero_topo import EdgeType
from pyg_direct.graph.placed_topology import PlacedTopology
from pyg_direct.object_text import one_line, show_count
from pyg_direct.ops.argument_checks import as_ids, check_ids, check_topology
from pyg_direct.ops.compute_content_hash import glance_only, has_content, read_content
from pyg_direct.ops.rows.upload import upload
from pyg_direct.ops.sampling.draw_walks import BoundsCheck, walk, walk_along
from pyg_direct.ops.sampling.find_induced import NeighborLists
from pyg_direct.runtime.cuda.device import resolve_device
from pyg_direct.runtime.host.threads import one_thread
from pyg_direct.sampling.induced_plan import InducedPlan, list_neighbors
from pyg_direct.sampling.random_key import check_seed, draw_seed
from pyg_direct.sampling.sampling_options import Sample
from pyg_direct.typing import Device


def random_walk(topology: CSRTopo | tuple[Tensor, Tensor], start: Any, walk_length: int, p: float = 1.0,
                q: float = 1.0, *, seed: int | None = None, device: Device = None,
                placement: str = "auto") -> Tensor:  # fmt: skip
    """Walk at random from each start, uniformly or as node2vec does (Grover and Leskovec, KDD 2016).

    A step leads from a node to one of the nodes in its row: a `CSRTopo` with `direction="out"` is walked along its
    edges. A neighbor is taken in proportion to 1 / p if the walk would go back; to 1 if the row of the node before has
    it too; otherwise to 1 / q. Each of parallel edges counts. A node without neighbors keeps its walk. Equal seeds give
    equal walks on every device.

    Args:
        topology: A `CSRTopo`, or row offsets int64 `[N + 1]` and neighbors int32 or int64 `[E]`, which are checked and
            placed in each call.
        start: First nodes, int32 or int64 `[W]` or a list, in [0, N).
        walk_length: Steps, at least 0.
        p, q: Finite and above 0. If one is not 1, the rows are sorted once.
        seed: Of the draws; None draws one from torch's generator.
        device: The device that walks; None is the current GPU if there is one, otherwise the CPU.
        placement: `auto`, `cuda`, `unified`, `pinned` or `cpu`: the memory of the rows.

    Returns:
        The nodes of each walk, int64 `[W, walk_length + 1]`, on the device.

    Raises:
        ArgumentError, ArgumentTypeError, IdError, DeviceError: named argument, rule and value.

    Example:
        >>> ring = CSRTopo(torch.tensor([[0, 1, 2], [1, 2, 0]]), direction="out")
        >>> random_walk(ring, [0, 2], 4, device="cpu")
        tensor([[0, 1, 2, 0, 1],
                [2, 0, 1, 2, 0]])
    """
    if isinstance(topology, (tuple, list)) and len(topology) == 2:
        topology = CSRTopo(indptr=topology[0], indices=topology[1])
    if not isinstance(topology, CSRTopo):
        raise ArgumentTypeError("topology must be a CSRTopo or a pair (row offsets, neighbors), got "
                                f"{type(topology).__name__}")  # fmt: skip
    target = resolve_device(device)
    placed, start = topology.place(placement, target), as_ids("start", start).to(target).contiguous()
    check = BoundsCheck("start", start, placed.num_nodes)
    seed = check_seed(seed)
    key = draw_seed() if seed is None else seed
    walks = find_rows(placed).walk(start, walk_length, p, q, key=key)
    # After the walks are enqueued, which end at invalid nodes: the check is made beside them.
    check.finish()
    return walks


def check_nodes(name: str, nodes: Tensor, num_nodes: int) -> Tensor:
    """Ids of nodes as `check_ids`, but those on a GPU are looked at too, which is waited for."""
    nodes = check_ids(name, nodes, num_nodes)
    BoundsCheck(name, nodes, num_nodes).finish()
    return nodes


class WalkRows:
    """The rows of a placed topology, on the way to walks.

    Arrays of a program are compared with their content before, because a write through NumPy is counted nowhere. A walk
    compares samples; `renew` compares all that `has_content` looks at. Offsets are copied, so that no such write, seen
    or not, leads a walk beyond them.
    """

    def __init__(self, topology: PlacedTopology) -> None:
        # Not held: these rows are kept as long as it is (see `find_rows`).
        self._topology = weakref.ref(topology)
        self._is_given = topology.is_given and not topology.indptr.is_cuda
        self._read(topology)

    def _read(self, topology: PlacedTopology) -> None:
        self.__dict__.pop("_sorted", None)
        self._lists = list_neighbors(topology)
        arrays = topology.indptr, topology.indices
        self._writes = self._count_writes(topology)
        self._contents = [read_content(array) for array in arrays] if self._is_given else []
        if self._is_given:
            self._lists = self._lists._replace(indptr=topology.indptr.clone())

    @staticmethod
    def _count_writes(topology: PlacedTopology) -> list[int]:
        """How often the arrays were written to, which a program may have given."""
        return [0 if array.is_inference() else array._version for array in (topology.indptr, topology.indices)]

    def renew(self) -> None:
        """Have the rows as a program's arrays are now.

        Raises:
            ArgumentError, IdError: they are no rows any more.
        """
        topology = self._topology()
        assert topology is not None
        topology.check_process()
        topology.check_unchanged()
        is_same = self._count_writes(topology) == self._writes
        if is_same and self._is_given:
            is_same = all(map(has_content, (topology.indptr, topology.indices), self._contents))
            if not is_same:
                check_topology(topology.indptr, topology.indices)
        if not is_same:
            self._read(topology)

    def walk(self, start: Tensor, walk_length: int, p: float, q: float, *, key: int) -> Tensor:
        """Draw the walks from `start`, on the device of the rows; see `ops.sampling.draw_walks.walk`."""
        with glance_only() if self._is_given else _NOTHING:
            self.renew()
        is_biased = not (p == 1 and q == 1)
        lists = self._sorted if is_biased else self._lists
        walks = walk(lists, start, walk_length, p, q, key=key, is_sorted=is_biased)
        if self._is_given:
            check_ids("neighbors of the topology", walks.view(-1), lists.num_nodes)
        return walks

    @cached_property
    def _sorted(self) -> NeighborLists:
        """Return the rows with ascending neighbors, for which a look for one of them is short."""
        lists = self._lists
        neighbors = lists.neighbors[:: lists.step]
        rows = torch.arange(lists.num_nodes, device=neighbors.device).repeat_interleave(
            lists.indptr.diff(), output_size=neighbors.numel())  # fmt: skip
        goes_on = rows[1:] == rows[:-1]
        if bool((goes_on & (neighbors[1:] < neighbors[:-1])).any()):
            order = neighbors.sort(stable=True).indices
            order = order[rows[order].sort(stable=True).indices]
            neighbors = neighbors[order]
        return NeighborLists(lists.indptr, neighbors.contiguous(), lists.ids[:0])


# Not made for each call.
_NOTHING = nullcontext()
_ROWS: weakref.WeakKeyDictionary[PlacedTopology, WalkRows] = weakref.WeakKeyDictionary()


def find_rows(topology: PlacedTopology) -> WalkRows:
    """Find the rows of a placed topology, sorted at most once for all who walk on it."""
    rows = _ROWS.get(topology)
    if rows is None:
        rows = _ROWS[topology] = WalkRows(topology)
    return rows


class MetapathWalks:
    """Walks along a sequence of relations (metapath2vec, Dong et al., KDD 2017), on one device.

    Args:
        rows: Row offsets and neighbors of each relation, which the caller has checked.
        metapath: The relations that steps follow, one after the other and again from the first.
        num_nodes: Nodes of the type that walks begin at.
    """

    def __init__(self, rows: Mapping[EdgeType, tuple[Tensor, Tensor]], metapath: Sequence[EdgeType],
                 walk_length: int, num_nodes: int, device: torch.device) -> None:  # fmt: skip
        used = list(dict.fromkeys(metapath))
        begins, offsets, neighbors, num_rows, num_edges = {}, [], [], 0, 0
        for kind in used:
            indptr, indices = rows[kind]
            begins[kind] = num_rows
            offsets.append(indptr[:-1] + num_edges)
            neighbors.append(indices)
            num_rows, num_edges = num_rows + indptr.numel() - 1, num_edges + indices.numel()
        indptr = torch.cat([*offsets, torch.tensor([num_edges], device="cpu")])
        indices = torch.cat(neighbors)
        if max(num_rows, num_nodes) < 2**31:
            indices = indices.int()
        indptr, indices = indptr.to(device), indices.to(device)
        self._lists = NeighborLists(indptr, indices, indices[:0])
        steps = [begins[metapath[step % len(metapath)]] for step in range(walk_length)]
        self._rows = torch.tensor(steps, dtype=torch.int64, device=device)
        self._num_nodes = num_nodes

    def walk(self, start: Tensor, *, key: int) -> Tensor:
        """Draw the walks from `start`, nodes of the first type on the device; see
        `ops.sampling.draw_walks.walk_along`.
        """
        return walk_along(self._lists, start, self._rows, self._num_nodes, key=key)


CHANCE_BITS = 20


class PPRRecipe(NamedTuple):
    """Parameters of the neighborhood of a seed.

    Attributes:
        num_neighbors: Nodes beside the seed, at most.
        alpha: Chance to restart before a step, in (0, 1).
    """

    num_neighbors: int
    alpha: float
    num_walks: int
    walk_length: int

    def list_chances(self) -> list[int]:
        """Chance to be at each step of a walk, in 2**-20, with a sum of 1."""
        one = 1 << CHANCE_BITS
        left = [round(one * (1 - self.alpha) ** step) for step in range(self.walk_length + 1)]
        return [own - after for own, after in zip(left, [*left[1:], 0], strict=True)]

    @property
    def total(self) -> int:
        """Sum of the scores of all nodes around a seed."""
        return self.num_walks << CHANCE_BITS


class PPRSample(NamedTuple):
    """Seeds with their neighborhoods.

    Attributes:
        sample: The seeds in the order given, then the other nodes ascending, and the edges of the graph among them.
        pairs: (places of nodes, places of the seeds whose neighborhoods have them), int64 `[2, P]`: seed after seed,
            the seed itself first, then by falling weight; of equal ones by id.
        weights: Estimates of their personalised PageRank, float32 `[P]`.
    """

    sample: Sample
    pairs: Tensor
    weights: Tensor

    def record_stream(self, stream: Any) -> None:
        """Tell torch's allocator that the sample is read on `stream` too."""
        self.sample.record_stream(stream)
        self.pairs.record_stream(stream)
        self.weights.record_stream(stream)


class PPRPlan:
    """Plan that finds neighborhoods of seeds in a graph.

    Args:
        induced: Finds the edges among nodes; its rows are walked on.
    """

    def __init__(self, induced: InducedPlan, recipe: PPRRecipe) -> None:
        self._induced, self._recipe = induced, recipe

    @one_line
    def __repr__(self) -> Iterator[str]:
        yield show_count(self._recipe.num_neighbors, "neighbor")
        yield repr(self._induced.topology)

    def submit(self, seeds: Tensor, key: int) -> PendingPPR:
        """Start to find the neighborhoods of seeds, on torch's current stream, without a wait for a GPU.

        Args:
            seeds: int64 `[B]` within [0, N), on the CPU or the plan's device.
            key: Unsigned 64-bit key of the walks.

        Raises:
            ArgumentError: rows that a program has written to are none any more; more seeds than 64 bits can number.
        """
        topology = self._induced.topology
        topology.check_process()
        topology.check_unchanged()
        seeds = upload(seeds, topology.device)
        # Torch's other threads would go on waiting awake beside loops of ours.
        with one_thread(topology.device.type == "cpu"):
            nodes, scores = score_nodes(self._induced.lists, seeds, self._recipe, key=key)
        return PendingPPR(self._induced, self._recipe, seeds, nodes, scores)


class PendingPPR:
    """Neighborhoods on their way: enqueued, their sizes not yet read."""

    def __init__(self, induced: InducedPlan, recipe: PPRRecipe, seeds: Tensor, nodes: Tensor, scores: Tensor) -> None:
        self._induced, self._recipe = induced, recipe
        self._seeds, self._nodes, self._scores = seeds, nodes, scores

    def finish(self) -> PPRSample:
        """Number the nodes and find the edges among them, on torch's current stream."""
        seeds = self._seeds
        with one_thread(seeds.device.type == "cpu"):
            kept = (self._nodes >= 0).view(-1).nonzero().view(-1)
            found = self._nodes.view(-1).index_select(0, kept)
            known = torch.cat([seeds, found]).unique()
            # Seeds have the places that they are given in, the first ones if they repeat.
            numbers = torch.arange(seeds.numel(), device=seeds.device)
            first = torch.full_like(known, seeds.numel())
            first.scatter_reduce_(0, torch.searchsorted(known, seeds), numbers, "amin")
            is_seed = first < seeds.numel()
            places = torch.where(is_seed, first, seeds.numel() - 1 + (~is_seed).cumsum(0))
            sources = places.index_select(0, torch.searchsorted(known, found))
            pairs = torch.stack([sources, kept // max(1, self._nodes.shape[1])])
            scores = self._scores.view(-1).index_select(0, kept)
            weights = (scores.double() / self._recipe.total).float()
            nodes = torch.cat([seeds, known[~is_seed]])
        return PPRSample(self._induced.sample(nodes), pairs, weights)


def score_nodes(lists: NeighborLists, seeds: Tensor, recipe: PPRRecipe, *, key: int) -> tuple[Tensor, Tensor]:
    """Find the nodes that walks from each seed are at most often.

    Args:
        lists: Rows of neighbors, with ids within [0, N), which is not checked.
        seeds: int64 `[B]`, on the device of the rows; a CPU checks that they lie in [0, N).
        key: Unsigned 64-bit key of the walks.

    Returns:
        (nodes, int64 `[B, K + 1]`: the seed, then by falling score, of equal ones by id, then -1; scores, int64 of the
        same shape, in units of 1 / `recipe.total`)
    """
    num_seeds, num_nodes = seeds.numel(), max(1, lists.num_nodes)
    num_steps, width = recipe.walk_length + 1, recipe.num_neighbors + 1
    if max(num_seeds, 1) * max(num_nodes * num_steps, recipe.total + 2) >= 2**63:
        raise ArgumentError(f"batch_size must be smaller, as walks of {num_seeds} seeds over {num_nodes} nodes are "
                            "more than 64 bits can number")  # fmt: skip
    walks = walk(lists, seeds.repeat_interleave(recipe.num_walks), recipe.walk_length, key=key)
    steps = torch.arange(num_steps, device=seeds.device)
    trees = torch.arange(num_seeds, device=seeds.device).repeat_interleave(recipe.num_walks).unsqueeze(1)
    visits = _sort(((trees * num_nodes + walks) * num_steps + steps).view(-1))
    chances = torch.tensor(recipe.list_chances(), device=seeds.device)
    sums = chances.index_select(0, visits % num_steps).cumsum_(0)
    visits = visits // num_steps
    is_last = torch.ones_like(visits, dtype=torch.bool)
    torch.ne(visits[1:], visits[:-1], out=is_last[:-1])
    return _keep_best(visits, sums, is_last, seeds, num_nodes, width, recipe.total)


def _keep_best(visits: Tensor, sums: Tensor, is_last: Tensor, seeds: Tensor, num_nodes: int, width: int, total: int
               ) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Find the best nodes of each seed, of visits in order with running sums of their chances."""
    # On a GPU the number of nodes would be waited for.
    visits, scores, is_last = (_mask_repeats if visits.is_cuda else _drop_repeats)(visits, sums, is_last)
    trees, nodes = visits // num_nodes, visits % num_nodes
    # Seeds come first, and last all visits but the last one of a node.
    ranked = torch.where(nodes == seeds.index_select(0, trees), total + 1, scores)
    order = _argsort(trees * (total + 2) + (total + 1 - torch.where(is_last, ranked, 0)))
    trees, nodes = trees.index_select(0, order), nodes.index_select(0, order)
    scores, is_kept = scores.index_select(0, order), is_last.index_select(0, order)
    begins = torch.searchsorted(trees, torch.arange(seeds.numel(), device=seeds.device))
    ranks = torch.arange(trees.numel(), device=seeds.device) - begins.index_select(0, trees)
    # Visits that are not kept fall into a place behind all.
    places = torch.where(is_kept & (ranks < width), trees * width + ranks, seeds.numel() * width)
    best = torch.full((2, seeds.numel() * width + 1), -1, dtype=torch.int64, device=seeds.device)
    best[0].scatter_(0, places, nodes)
    best[1].scatter_(0, places, scores)
    found, points = best[:, :-1].reshape(2, seeds.numel(), width).unbind()
    return found, points


def _drop_repeats(visits: Tensor, sums: Tensor, is_last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(nodes once each, their scores, whether they count)."""
    at = is_last.nonzero().view(-1)
    sums = sums.index_select(0, at)
    return visits.index_select(0, at), sums.diff(prepend=sums.new_zeros(1)), is_last.index_select(0, at)


def _mask_repeats(visits: Tensor, sums: Tensor, is_last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same, but repeats stay and do not count; scores of the others are right."""
    # Sums do not fall, so that the largest one before a node belongs to the last visit of the node before.
    before = torch.where(is_last, sums, 0).cummax(0).values.roll(1)
    before[:1] = 0
    return visits, sums - before, is_last


def _sort(values: Tensor) -> Tensor:
    """Values in order; on a CPU by NumPy, which takes a third of torch's time."""
    return values.sort().values if values.is_cuda else torch.from_numpy(np.sort(values.numpy()))


def _argsort(values: Tensor) -> Tensor:
    """Places of values in order, of equal ones the first one first."""
    if values.is_cuda:
        return values.sort(stable=True).indices
    return torch.from_numpy(np.argsort(values.numpy(), kind="stable"))
