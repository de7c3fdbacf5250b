"""Neighborhoods by personalised PageRank: the nodes that walks with restart from a seed are at most often.

A walk that restarts with chance `alpha` before each step is at its step k with chance alpha (1 - alpha)^k. So fixed
walks from a seed estimate its PageRank when each step counts by that chance (Avrachenkov et al., SIAM J. Numer. Anal.
2007, the complete path); the last step takes the rest. Chances are integers of 2**-20, and sums of them exact, so
that equal keys give equal neighborhoods on every device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError
from pyg_direct.object_text import one_line, show_count
from pyg_direct.ops.rows.upload import upload
from pyg_direct.ops.sampling.draw_walks import walk
from pyg_direct.ops.sampling.find_induced import NeighborLists
from pyg_direct.runtime.host.threads import one_thread
from pyg_direct.sampling.induced_plan import InducedPlan
from pyg_direct.sampling.sampling_options import Sample

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
