"""Which rows are read most: ranked by the graph, by counted reads, or by a user's scores."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.ops.check import check_ids
from pyg_direct.progress import Bar, show_wait

RANKINGS = ("degree", "frequency", "expected")


class Listing(Protocol):
    """What ranks rows: the part of a `CSRTopo` that a feature reads."""

    @property
    def indices(self) -> Tensor:
        """Nodes listed by rows, `[E]`."""

    @property
    def node_count(self) -> int:
        """N."""

    @property
    def edge_count(self) -> int:
        """E."""


class Ranked(NamedTuple):
    """A `Listing` whose rows were ranked already."""

    indices: Tensor
    node_count: int
    edge_count: int
    scores: Tensor


class Hottest(NamedTuple):
    """The hottest rows of a table, as many as were asked for.

    Attributes:
        ids: Ascending, int64, on the CPU.
        misses: Share of all reads that goes to other rows, as far as the scores tell.
    """

    ids: Tensor
    misses: float


def check_hotness(hotness: str | Tensor) -> None:
    """Refuse what ranks no rows.

    Raises:
        ArgumentError, ArgumentTypeError: named argument, rule and value.
    """
    if isinstance(hotness, Tensor):
        if hotness.dim() != 1 or hotness.is_complex():
            raise ArgumentError(f"hotness must hold one number for each row, got {tuple(hotness.shape)} of "
                                f"{hotness.dtype}")  # fmt: skip
        return
    if not isinstance(hotness, str):
        raise ArgumentTypeError(f"hotness must be a name or a tensor of scores, got {type(hotness).__name__}")
    if hotness not in RANKINGS:
        raise ArgumentError(f"hotness must be one of {', '.join(RANKINGS)} or a tensor of scores, got {hotness!r}")


def check_scores(hotness: str | Tensor, csr_topo: Listing | None, num_rows: int) -> None:
    """Refuse what does not rank these rows.

    Raises:
        ArgumentError: there are other than `num_rows` scores, one is no number, or reads were not counted yet.
    """
    if isinstance(hotness, Tensor):
        if len(hotness) != num_rows:
            raise ArgumentError(f"hotness must hold a score for each of the {num_rows} rows, got {len(hotness)}")
        if hotness.is_floating_point() and bool(hotness.isnan().any()):
            raise ArgumentError("hotness must hold numbers, got a NaN")
    elif hotness != "degree" and not isinstance(csr_topo, Ranked):
        raise ArgumentError(f"hotness={hotness!r} needs to know what is sampled: pass hotness=count_reads(...) or "
                            "hotness=expected_reads(...), or let a NeighborLoader do it")  # fmt: skip


def score_rows(hotness: str | Tensor, csr_topo: Listing | None, num_rows: int) -> Tensor | None:
    """Scores of all rows, `[num_rows]`; None where nothing tells them apart.

    Raises:
        ArgumentError: as of `check_scores`.
    """
    check_scores(hotness, csr_topo, num_rows)
    if isinstance(hotness, Tensor):
        return hotness
    if isinstance(csr_topo, Ranked):
        return csr_topo.scores
    return None if csr_topo is None else count_listings(csr_topo, num_rows)


def choose_hottest(scores: Tensor | None, num_rows: int, count: int) -> Hottest:
    """The `count` rows with the highest scores, the first ones among equals; without scores the first rows."""
    if scores is None:
        return Hottest(torch.arange(count, device="cpu"), 1 - count / max(1, num_rows))
    with show_wait("sorting rows by hotness", items=num_rows):
        ranked, order = scores.sort(descending=True, stable=True)
    ranked = ranked.clamp(min=0).double()
    misses = 1 - float(ranked[:count].sum()) / max(float(ranked.sum()), 1e-300)
    return Hottest(order[:count].sort().values.cpu(), min(1.0, max(0.0, misses)))


def count_listings(csr_topo: Listing, num_rows: int) -> Tensor:
    """How many rows of the topology list each node, int64 `[num_rows]`: how often sampling may meet it."""
    counts = torch.zeros(num_rows, dtype=torch.int64, device=csr_topo.indices.device)
    # A piece takes memory as its counts do, which a GPU may have little of.
    step = max(1 << 22, num_rows)
    with Bar(csr_topo.edge_count, "ranking rows by degree", "edges") as bar:
        for begin in range(0, csr_topo.edge_count, step):
            piece = csr_topo.indices[begin : begin + step]
            counts += torch.bincount(piece, minlength=num_rows)
            bar.update(piece.numel())
    return counts


def blend_reads(counts: Tensor, chances: Tensor) -> Tensor:
    """Reads to be expected of each row, float64 `[N]`: those that its chance tells, and of what a pre-sampling run
    counted beside them as much as can be trusted.

    The credibility of counts (Buehlmann, 1967): squares of what they miss their expectation m by are phi * m for what
    chance does in a run, and v * m**2 for rows that are read more or less often than it was computed. Both are found by
    a line through all rows, and of a row's difference v * m / (phi + v * m) is kept: hardly any of a short run, where
    most rows are read once or never, and nearly all of many epochs.

    Args:
        counts: As of `count_reads`, `[N]`.
        chances: As of `expected_reads`, `[N]`, on the same device.
    """
    counts, chances = counts.double(), chances.double()
    expected = chances * (counts.sum() / chances.sum().clamp(min=1e-300))
    misses = counts - expected
    weights = expected / (1 + 2 * expected)
    weights = weights / weights.sum().clamp(min=1e-300)
    squares = misses.square() / expected.clamp(min=1e-300) * (expected > 0)
    mean, mean_square = (weights * expected).sum(), (weights * squares).sum()
    spread = weights * (expected - mean)
    v = ((spread * squares).sum() / (spread * (expected - mean)).sum().clamp(min=1e-300)).clamp(min=0)
    phi = (mean_square - v * mean).clamp(min=1e-3)
    return expected + v * expected / (phi + v * expected) * misses


def count_reads(batches: Iterable[Tensor], num_rows: int) -> Tensor:
    """How often each row is read by the batches of a pre-sampling run, int32 `[num_rows]`, counted where their ids are
    (GNNLab, EuroSys 2022, section 6). Pass it as `Feature(hotness=)`.

    Args:
        batches: Ids of the rows that a batch reads, int32 or int64 `[n]` each, such as `n_id` of a sample.
        num_rows: N.

    Raises:
        ArgumentError, ArgumentTypeError: named argument, rule and value; of ids outside [0, num_rows) at the end.
    """
    if isinstance(num_rows, bool) or not isinstance(num_rows, int) or not 0 <= num_rows < 2**62:
        raise ArgumentError(f"num_rows must be an integer in [0, 2**62), got {num_rows!r}")
    counts: Tensor | None = None
    for ids in batches:
        ids = check_ids("batches", ids)
        if counts is None:
            # One place more, for ids that are none.
            counts = torch.zeros(num_rows + 1, dtype=torch.int32, device=ids.device)
        ids = torch.where((ids >= 0) & (ids < num_rows), ids, num_rows).long()
        counts.index_add_(0, ids, torch.ones(1, dtype=torch.int32, device=ids.device).expand(ids.numel()))
    if counts is None:
        return torch.zeros(num_rows, dtype=torch.int32, device="cpu")
    if int(counts[-1]) > 0:
        raise ArgumentError(f"batches must hold ids in [0, {num_rows}), got {int(counts[-1])} outside")
    return counts[:-1]
