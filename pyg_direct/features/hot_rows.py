"""Hot rows: the rows that are read most, ranked by the graph, by counted reads, or by a user's scores.

`expected_reads` and `expected_edge_reads` compute from the graph how often sampling reads each row, instead of counting
it. They give the chance that a batch meets a node, or samples an edge. A hop meets a node if one of the expanded rows
picks it, each with chance min(1, k / degree). Chances of different rows are assumed independent. The computation takes
one pass over the edges per hop. A counting run needs an epoch to distinguish the rows of medium heat.

`fit_budget` and `copy_to_gpu` give the hot rows of a `Feature` GPU memory and copy them there. `share_budget`
divides one budget of GPU memory between the hot rows of several tables.

`ReadCounts` follows the reads: hot rows are chosen again from decaying counts, on the GPU and without a wait.
Measured with a tenth of the rows cached and a tenth of all rows read in each batch. The second column is a cache that
is renewed every 25 batches, the third one that was ranked once by the first 20 batches. Moved rows count as misses
(`benchmarks/features/hot_rows.py`).

| rows that change places in each batch      | reads served, renewed | reads served, ranked once |
| ------------------------------------------ | --------------------- | ------------------------- |
| 1 %                                        | 0.25                  | 0.14                      |
| 5 %                                        | 0.14                  | 0.10                      |
| 20 %: recent reads do not predict the next | 0.09                  | 0.10                      |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, ArgumentTypeError, PlacementWarning, warn
from pyg_direct.ops.argument_checks import check_count, check_fanouts, check_ids, check_topology, check_topology_kinds
from pyg_direct.ops.sampling.sample_uniform import spread_values
from pyg_direct.progress import Bar, show_wait
from pyg_direct.runtime.cuda.device import free_bytes
from pyg_direct.runtime.host.host_memory import parse_size

RANKINGS = ("degree", "frequency", "expected")


class Listing(Protocol):
    """Ranking of rows: the part of a `CSRTopo` that a feature reads."""

    @property
    def indices(self) -> Tensor:
        """Nodes listed by rows, `[E]`."""

    @property
    def node_count(self) -> int:
        """N."""

    @property
    def edge_count(self) -> int:
        """E."""


class Ranked:
    """A `Listing` whose rows have scores, computed when a cache asks for them first: most rows need none.

    Args:
        scores: One for each row, `[N]`, or a function that computes them.
    """

    def __init__(self, listing: Listing, scores: Tensor | Callable[[], Tensor]) -> None:
        self._listing, self._scores = listing, scores

    @property
    def indices(self) -> Tensor:
        """Nodes listed by rows, `[E]`."""
        return self._listing.indices

    @property
    def node_count(self) -> int:
        """N."""
        return self._listing.node_count

    @property
    def edge_count(self) -> int:
        """E."""
        return self._listing.edge_count

    @property
    def scores(self) -> Tensor:
        """Scores of the rows, `[N]`."""
        if not isinstance(self._scores, Tensor):
            self._scores = self._scores()
        return self._scores


class Hottest(NamedTuple):
    """The hottest rows of a table, as many as were asked for.

    Attributes:
        ids: Ascending, int64, on the CPU.
        misses: Share of all reads that goes to other rows, according to the scores.
    """

    ids: Tensor
    misses: float


def warn_of_frequency(hotness: Any) -> None:
    """Warn of `hotness="frequency"`, which will be removed."""
    if isinstance(hotness, str) and hotness == "frequency":
        warn("hotness='frequency' and presample are deprecated since 0.2.0: use hotness='expected', the default, which "
             "computes what they count", DeprecationWarning)  # fmt: skip


def check_hotness(hotness: str | Tensor) -> None:
    """Refuse a value that ranks no rows."""
    if isinstance(hotness, Tensor):
        if hotness.dim() != 1 or hotness.is_complex():
            raise ArgumentError(f"hotness must hold one number for each row, got {tuple(hotness.shape)} of "
                                f"{hotness.dtype}")  # fmt: skip
        return
    if not isinstance(hotness, str):
        raise ArgumentTypeError(f"hotness must be a name or a tensor of scores, got {type(hotness).__name__}")
    if hotness not in RANKINGS:
        raise ArgumentError(f"hotness must be one of {', '.join(RANKINGS)} or a tensor of scores, got {hotness!r}")
    warn_of_frequency(hotness)


def check_scores(hotness: str | Tensor, csr_topo: Listing | None, num_rows: int) -> None:
    """Refuse scores that do not rank these rows."""
    if isinstance(hotness, Tensor):
        if len(hotness) != num_rows:
            raise ArgumentError(f"hotness must hold a score for each of the {num_rows} rows, got {len(hotness)}")
        if hotness.is_floating_point() and bool(hotness.isnan().any()):
            raise ArgumentError("hotness must hold numbers, got a NaN")
    elif hotness != "degree" and not isinstance(csr_topo, Ranked):
        raise ArgumentError(f"hotness={hotness!r} needs to know what is sampled: pass hotness=count_reads(...) or "
                            "hotness=expected_reads(...), or let a NeighborLoader do it")  # fmt: skip


def score_rows(hotness: str | Tensor, csr_topo: Listing | None, num_rows: int) -> Tensor | None:
    """Return scores of all rows, `[num_rows]`; None if all rows are equal."""
    check_scores(hotness, csr_topo, num_rows)
    if isinstance(hotness, Tensor):
        return hotness
    if isinstance(csr_topo, Ranked):
        return csr_topo.scores
    return None if csr_topo is None else count_listings(csr_topo, num_rows)


def choose_hottest(scores: Tensor | None, num_rows: int, count: int) -> Hottest:
    """Choose the `count` rows with the highest scores, the first ones among equals; without scores the first rows."""
    if scores is None:
        return Hottest(torch.arange(count, device="cpu"), 1 - count / max(1, num_rows))
    with show_wait("sorting rows by hotness", items=num_rows):
        ranked, order = scores.sort(descending=True, stable=True)
    ranked = ranked.clamp(min=0).double()
    misses = 1 - float(ranked[:count].sum()) / max(float(ranked.sum()), 1e-300)
    return Hottest(order[:count].sort().values.cpu(), min(1.0, max(0.0, misses)))


def count_listings(csr_topo: Listing, num_rows: int) -> Tensor:
    """Count the rows of the topology that list each node, int64 `[num_rows]`: how often sampling may meet it."""
    counts = torch.zeros(num_rows, dtype=torch.int64, device=csr_topo.indices.device)
    # A piece takes as much memory as its counts do, and a GPU may have little.
    step = max(1 << 22, num_rows)
    with Bar(csr_topo.edge_count, "ranking rows by degree", "edges") as bar:
        for begin in range(0, csr_topo.edge_count, step):
            piece = csr_topo.indices[begin : begin + step]
            counts += torch.bincount(piece, minlength=num_rows)
            bar.update(piece.numel())
    return counts


def blend_reads(counts: Tensor, chances: Tensor) -> Tensor:
    """Return the expected reads of each row, float64 `[N]`: its chance, corrected by the credible part of the counts of
    a pre-sampling run.

    The credibility of counts is after Buehlmann (1967). Let m be the expected count of a row. The squared error of a
    count is phi * m by chance within a run. It is v * m**2 if a row is read more or less often than computed. A line
    through all rows gives both. The share v * m / (phi + v * m) of a row's difference is kept. This is nearly zero for
    a short run, in which most rows are read once or never, and nearly one for many epochs.

    Args:
        counts: As returned by `count_reads`, `[N]`.
        chances: As returned by `expected_reads`, `[N]`, on the same device.
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
    """Count how often the batches of a pre-sampling run read each row, int32 `[num_rows]`, on the device of their ids
    (GNNLab, EuroSys 2022, section 6). Pass it as `Feature(hotness=)`.

    Args:
        batches: Ids of the rows that a batch reads, int32 or int64 `[n]` each, such as `n_id` of a sample.
        num_rows: N.

    Raises:
        ArgumentError, ArgumentTypeError: named argument, rule and value; of ids outside [0, num_rows) at the end.

    Example:
        >>> count_reads([torch.tensor([0, 2]), torch.tensor([2, 3])], num_rows=4).tolist()
        [1, 0, 2, 1]
    """
    if isinstance(num_rows, bool) or not isinstance(num_rows, int) or not 0 <= num_rows < 2**62:
        raise ArgumentError(f"num_rows must be an integer in [0, 2**62), got {num_rows!r}")
    counts: Tensor | None = None
    for ids in batches:
        ids = check_ids("batches", ids)
        if counts is None:
            # One place more, for invalid ids.
            counts = torch.zeros(num_rows + 1, dtype=torch.int32, device=ids.device)
        ids = torch.where((ids >= 0) & (ids < num_rows), ids, num_rows).long()
        counts.index_add_(0, ids, torch.ones(1, dtype=torch.int32, device=ids.device).expand(ids.numel()))
    if counts is None:
        return torch.zeros(num_rows, dtype=torch.int32, device="cpu")
    if int(counts[-1]) > 0:
        raise ArgumentError(f"batches must hold ids in [0, {num_rows}), got {int(counts[-1])} outside")
    return counts[:-1]


def expected_reads(indptr: Tensor, indices: Tensor, input_nodes: Tensor, num_neighbors: Sequence[int],
                   batch_size: int) -> Tensor:  # fmt: skip
    """Compute the chance of each node to be in a batch, float32 `[N]`, on the device of the topology. Pass it as
    `Feature(hotness=)`.

    Args:
        indptr: Row offsets, int64 `[N + 1]`: `csr_topo.indptr`.
        indices: Neighbors, int32 or int64 `[E]`: `csr_topo.indices`.
        input_nodes: Nodes that batches begin with, int32 or int64 `[S]`; one may be listed several times.
        num_neighbors: Fanout of each hop; -1 for all neighbors.
        batch_size: Number of input nodes in a batch.

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.

    Example:
        >>> topo = CSRTopo(torch.tensor([[1, 2, 3], [0, 0, 1]]))  # 1 and 2 lead to 0, 3 to 1
        >>> expected_reads(topo.indptr, topo.indices, torch.tensor([0]), [1, 1], batch_size=1).tolist()
        [1.0, 0.5, 0.5, 0.5]
    """
    return _compute(indptr, indices, input_nodes, num_neighbors, batch_size)[0]


def expected_edge_reads(indptr: Tensor, indices: Tensor, input_nodes: Tensor, num_neighbors: Sequence[int],
                        batch_size: int, eid: Tensor | None = None) -> Tensor:  # fmt: skip
    """Compute the chance of each edge to be in a batch, float32 `[E]` by edge id, on the device of the topology. Pass
    it as `Feature(hotness=)` for rows of edges. It takes 8 bytes an edge beside the result.

    An edge is sampled if a hop expands its target and picks it, with chance min(1, k / degree). A batch expands a node
    once, so the chances of its hops add up.

    Args:
        indptr, indices, input_nodes, num_neighbors, batch_size: See `expected_reads`.
        eid: Edge ids, int32 or int64 `[E]`: `csr_topo.eid`. None: the position of an edge is its id.

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.

    Example:
        >>> topo = CSRTopo(torch.tensor([[1, 2, 3], [0, 0, 1]]))  # 1 and 2 lead to 0, 3 to 1
        >>> expected_edge_reads(topo.indptr, topo.indices, torch.tensor([0]), [1, 1], batch_size=1).tolist()
        [0.5, 0.5, 0.5]
    """
    picked = _compute(indptr, indices, input_nodes, num_neighbors, batch_size)[1]
    return order_by_edge(picked, indptr, indices.numel(), eid)


def order_by_edge(picked: Tensor, indptr: Tensor, num_edges: int, eid: Tensor | None) -> Tensor:
    """Order chances of the edges of each row, float32 `[S]`, by edge id: float32 `[E]`.

    Args:
        picked: See `follow_chances`.
        indptr: Row offsets, int64 `[S + 1]`.
        eid: See `expected_edge_reads`.
    """
    # All edges of a target have one chance.
    reads = picked.repeat_interleave(indptr[1:] - indptr[:-1], output_size=num_edges)
    if eid is None:
        return reads
    eid = check_ids("eid", eid, num_edges)
    if eid.numel() != num_edges:
        raise ArgumentError(f"eid must hold an id for each of the {num_edges} edges, got {eid.numel()}")
    if eid.is_cuda and num_edges > 0:
        check_ids("eid", torch.stack(torch.aminmax(eid)).cpu(), num_edges)
    return torch.zeros_like(reads).index_copy_(0, eid.to(reads.device).long(), reads)


def _compute(indptr: Tensor, indices: Tensor, input_nodes: Tensor, num_neighbors: Sequence[int], batch_size: int
             ) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (chance of each node to be in a batch, chance of each edge that leads to it), float32 `[N]` both."""
    check_ids("input_nodes", input_nodes)
    # A GPU would have to wait for their values.
    (check_topology_kinds if isinstance(indptr, Tensor) and indptr.is_cuda else check_topology)(indptr, indices)
    num_nodes = indptr.numel() - 1
    fanouts = check_fanouts("num_neighbors", num_neighbors)
    input_nodes = check_ids("input_nodes", input_nodes.cpu(), num_nodes).long().to(indptr.device)
    check_count("batch_size", batch_size)
    chance = chance_of_seeds(input_nodes, num_nodes, batch_size)
    chance, (picked,) = follow_chances([ListedRows(indptr, indices, slice(0, num_nodes), fanouts)], chance)
    return chance, picked


class ListedRows(NamedTuple):
    """Neighbor lists of the nodes of a type, and the fanouts that they are sampled with.

    Attributes:
        indptr: Row offsets, int64 `[S + 1]`, from 0.
        indices: Neighbors by their ids among all nodes, int32 or int64 `[E]` within [0, N), which is not checked.
        nodes: The nodes that have these lists, among all.
        fanouts: Neighbors that each hop picks; -1 for all. As many hops for all lists of a graph.
    """

    indptr: Tensor
    indices: Tensor
    nodes: slice
    fanouts: Sequence[int]


def chance_of_seeds(seeds: Tensor, num_nodes: int, batch_size: int) -> Tensor:
    """Compute the chance of each node to be a seed of a batch, float32 `[N]`, on the device of the seeds.

    Args:
        seeds: Nodes that batches begin with, int64 `[S]`; if a node is listed several times, each position may bring
            it.
    """
    copies = torch.zeros(num_nodes, dtype=torch.float32, device=seeds.device)
    if seeds.numel() == 0:
        return copies
    copies.index_add_(0, seeds, torch.ones_like(copies[:1]).expand(len(seeds)))
    return 1 - (1 - min(1.0, batch_size / seeds.numel())) ** copies


def follow_chances(lists: Sequence[ListedRows], chance: Tensor, replace: bool = False) -> tuple[Tensor, list[Tensor]]:
    """Compute the chance of each node to be in a batch from its chance to be a seed, one pass over the edges a hop.

    Args:
        lists: Neighbor lists of the graph, one for each relation, on one device.
        chance: Chance of each node to be a seed, float32 `[N]`, on that device.

    Returns:
        The chances of nodes, float32 `[N]`, and for each of `lists` the chance of an edge of a row, float32 `[S]`.
    """
    picked = [torch.zeros_like(chance[rows.nodes]) for rows in lists]
    num_hops = max((len(rows.fanouts) for rows in lists), default=0)
    expanded = chance
    num_reads = sum(len(rows.fanouts) * rows.indices.numel() for rows in lists)
    with Bar(num_reads, "ranking rows by expected reads", "edges") as bar:
        for hop in range(num_hops):
            spared = torch.zeros_like(chance)
            for rows, own in zip(lists, picked, strict=True):
                reads = expanded[rows.nodes] * _chance_of_pick(rows.indptr, rows.fanouts[hop], replace)
                own += reads
                # Just below 1, because log(0) is not finite.
                weights = -torch.log1p(-reads.clamp(max=1 - 1e-6))
                spared -= spread_values(rows.indptr, rows.indices, weights, bar, chance.numel())
            after = 1 - (1 - chance) * torch.exp(spared)
            expanded, chance = after - chance, after
    return chance, picked


def _chance_of_pick(indptr: Tensor, fanout: int, replace: bool) -> Tensor | float:
    """Compute the chance of each edge of a row that is expanded, float32 `[S]`."""
    if fanout < 0:
        return 1.0
    degree = (indptr[1:] - indptr[:-1]).clamp(min=1).float()
    return 1 - (1 - 1 / degree) ** fanout if replace else (fanout / degree).clamp(max=1.0)


# Share of the free memory of a GPU that hot rows may take.
_HOT_SHARE = 0.9
# Rows that are copied to GPU memory at once.
_ROWS_AT_ONCE = 1 << 18


def fit_budget(budget: int, asked: int | str, device: torch.device) -> int:
    """Return as many of `budget` bytes as are free on the GPU; a warning names `asked` if they are fewer."""
    most = int(_HOT_SHARE * free_bytes(device.index or 0))
    if budget > most:
        warn(f"device_cache_size={asked!r} is more than the free memory of {device}; "
             f"{most} bytes are used instead", PlacementWarning)  # fmt: skip
    return min(budget, most)


def copy_to_gpu(rows: Tensor, ids: Tensor | None, device: torch.device) -> Tensor | None:
    """Copy all rows, or the rows of `ids`, to GPU memory; return None if it runs out."""
    try:
        hot = torch.empty((len(rows) if ids is None else len(ids), *rows.shape[1:]), dtype=rows.dtype, device=device)
    except torch.OutOfMemoryError:
        return None
    with show_wait("copying rows to GPU memory", items=hot.numel()):
        copy_rows(rows, ids, hot)
    return hot


def copy_rows(rows: Tensor, ids: Tensor | None, target: Tensor) -> None:
    """Copy all rows, or the rows of `ids`, in pieces, so that the host holds no second copy of them."""
    if ids is None:
        target.copy_(rows)
        return
    for part, ids_of_part in zip(target.split(_ROWS_AT_ONCE), ids.split(_ROWS_AT_ONCE), strict=True):
        part.copy_(rows[ids_of_part])


def shrink_budget(budget: int, asked: int | str) -> int:
    """Return half of `budget` bytes, which the GPU had no memory for; a warning names `asked`."""
    torch.cuda.empty_cache()
    warn(
        f"device_cache_size={asked!r}: GPU memory ran out for {budget} bytes of "
        f"hot rows; {budget // 2} are tried instead",
        PlacementWarning,
    )
    return budget // 2


class Demand(NamedTuple):
    """A table whose hot rows want GPU memory: expected reads of each row in a batch, `[N]`, and bytes of a row."""

    reads: Tensor
    row_bytes: int


def share_budget(demands: Mapping[Any, Demand], budget: int | str) -> dict[Any, int]:
    """Return the bytes for hot rows of each table. Rows of all tables are taken by expected reads per byte, until the
    first that does not fit; among equals, earlier tables come first. It takes about 40 bytes a row, on the device of
    the scores.

    Args:
        demands: By key, on one device; `reads` in one unit.
        budget: GPU memory for all tables together: bytes, `"2G"`, or a share of their bytes such as `"20%"`.
    """
    reads, row_bytes = [demand.reads for demand in demands.values()], [demand.row_bytes for demand in demands.values()]
    whole = sum(size * len(scores) for scores, size in zip(reads, row_bytes, strict=True))
    most = parse_size(budget, whole, "feature_cache")
    if not demands:
        return {}
    device, lengths = reads[0].device, torch.tensor([len(scores) for scores in reads], device="cpu")
    densities = torch.cat([scores.float() / max(1, size) for scores, size in zip(reads, row_bytes, strict=True)])
    order = densities.sort(descending=True, stable=True).indices
    table = torch.arange(len(reads), device=device).repeat_interleave(lengths.to(device))[order]
    sizes = torch.tensor(row_bytes, device=device)
    counts = torch.bincount(table[sizes[table].cumsum(0) <= most], minlength=len(reads))
    return dict(zip(demands, (counts * sizes).tolist(), strict=True))


class ReadCounts:
    """Counts of reads that decay."""

    def __init__(self, num_rows: int, period: int, fade: float, device: torch.device) -> None:
        # One place more, for invalid ids.
        self._counts = torch.zeros(num_rows + 1, device=device)
        self._one = torch.ones(1, device=device)
        self._period, self._fade, self._number = period, fade, 0
        # Streams that have read the present hot rows, and the event that a stream waits for before its first read.
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._renewed: torch.cuda.Event | None = None

    def note(self, ids: Tensor) -> bool:
        """Count a read; return True if it is time to choose again."""
        last = self._counts.numel() - 1
        known = torch.where((ids >= 0) & (ids < last), ids, last)
        self._counts.index_add_(0, known.long(), self._one.expand(ids.numel()))
        self._number += 1
        return self._number % self._period == 0

    def choose(self, count: int) -> Tensor:
        """Return the rows read most lately, ascending."""
        ids = self._counts[:-1].topk(count, sorted=False).indices.sort().values
        self._counts.mul_(self._fade)
        return ids

    def order_reads(self, device: torch.device) -> None:
        """Make the current stream of a GPU wait for the present hot rows."""
        stream = torch.cuda.current_stream(device)
        if stream.cuda_stream not in self._streams:
            self._streams[stream.cuda_stream] = stream
            if self._renewed is not None:
                stream.wait_event(self._renewed)

    def hand_over(self, old: Sequence[Tensor], device: torch.device) -> None:
        """Keep old hot rows until all streams have read them; other streams wait for writes of the current one."""
        for stream in self._streams.values():
            for tensor in old:
                tensor.record_stream(stream)
        current = torch.cuda.current_stream(device)
        self._streams = {current.cuda_stream: current}
        self._renewed = torch.cuda.Event()
        self._renewed.record(current)
