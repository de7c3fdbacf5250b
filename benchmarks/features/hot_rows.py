"""Quality and cost of the choice of hot rows: hit rate in an epoch, beside the best choice in hindsight."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median

import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_direct.bench.limits import time_on_clock, wait_for_gpu
from pyg_direct.bench.loader import make_step, run_steps, without_end
from pyg_direct.bench.result_row import Row
from pyg_direct.features.hot_rows import (
    ReadCounts,
    blend_reads,
    choose_hottest,
    count_listings,
    count_reads,
    expected_reads,
)
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.loader.hot_row_ranking import score_nodes
from pyg_direct.loader.neighbor_loader import NeighborLoader
from pyg_direct.runtime.cuda.device import resolve_device
from pyg_direct.sampling.graphsage_sampler import GraphSageSampler

_SHARES = (0.05, 0.2)


def make_skewed_graph(num_nodes: int, num_edges: int, seed: int = 0) -> Tensor:
    """Make edges `[2, E]` of a graph like web crawls (cnr-2000).

    Pages of a site link to each other, and a few pages of all sites are linked by very many. Pages with many links have
    few links to them.
    """
    draws = torch.Generator().manual_seed(seed)
    target = torch.randint(num_nodes, (num_edges,), generator=draws)
    popular = (torch.rand(num_edges, generator=draws) ** 6 * num_nodes).long().clamp_(max=num_nodes - 1)
    near = (target + (torch.randn(num_edges, generator=draws) * 20).long()) % num_nodes
    names = torch.randperm(num_nodes, generator=draws)
    source = torch.where(torch.rand(num_edges, generator=draws) < 0.5, names[popular], near)
    return torch.stack([source, target])


def measure_hit_rates(edge_index: Tensor, num_nodes: int, train_idx: Tensor, name: str, fanouts: tuple[int, ...],
                      batch_size: int = 1024, share: float = 0.05) -> Iterator[Row]:  # fmt: skip
    """Measure hit rates of an epoch for several rankings.

    These are by degree, by the probability that a batch reads a row, and by this probability blended with counted
    reads. Reads are counted in a part of an epoch, and in a whole one.

    Args:
        share: Part of an epoch that is sampled for counting.
    """
    topology = CSRTopo(edge_index, num_nodes=num_nodes)
    device = resolve_device(None)

    def sample(seed: int, part: float = 1.0) -> Iterator[Tensor]:
        order = torch.randperm(len(train_idx), generator=torch.Generator().manual_seed(seed))
        parts = train_idx[order].split(batch_size)
        sampler = GraphSageSampler(topology, list(fanouts), device=device, seed=seed)
        for seeds in parts[: max(1, round(part * len(parts)))]:
            yield sampler.sample(seeds)[0]

    reads = count_reads(sample(1), num_nodes)
    placed = topology.place("cuda" if device.type == "cuda" else "cpu", device)
    rankings, seconds = {"degree": count_listings(topology, num_nodes).to(reads.device)}, {}
    # The second time, with compiled kernels.
    for _ in range(2):
        wait_for_gpu()
        begin = time.perf_counter()
        chances = expected_reads(placed.indptr, placed.indices, train_idx, fanouts, batch_size)
        wait_for_gpu()
        seconds["expectation"] = time.perf_counter() - begin
    for part, seed in ((share, 2), (1.0, 3)):
        label = f"frequency, {part:.0%} of an epoch sampled"
        begin = time.perf_counter()
        rankings[label] = blend_reads(count_reads(sample(seed, part), num_nodes), chances)
        wait_for_gpu()
        seconds[label] = seconds["expectation"] + time.perf_counter() - begin
    rankings["expectation"] = chances
    for cached in _SHARES:
        count = int(cached * num_nodes)
        best = reads.sort(descending=True).values[:count].sum() / reads.sum()
        for label, scores in rankings.items():
            ids = choose_hottest(scores, num_nodes, count).ids.to(reads.device)
            rate = float(reads[ids].sum() / reads.sum())
            took = f", found in {seconds[label]:.2f} s" if label in seconds else ""
            note = f"fanouts {list(fanouts)}, batches of {batch_size}{took}"
            yield Row.of(f"hotness/{name}/{cached:.0%} cached", f"hit rate by {label}", "", [rate], float(best),
                         "the best rows in hindsight", note)  # fmt: skip


def measure_ranking(data: Data, train_idx: Tensor, num_classes: int, name: str, batches: int = 60) -> Iterator[Row]:
    """Measure the time for a loader's ranking of rows before its first epoch, beside an epoch of training with it."""
    batch_size, fanouts = min(1024, len(train_idx)), [15, 10, 5]

    loader = NeighborLoader(data, fanouts, train_idx, batch_size=batch_size, shuffle=True, drop_last=True, seed=0)
    step = make_step(next(iter(loader)), num_classes)
    times = run_steps(without_end(loader), step, batches)
    epoch = median(times) * len(loader)

    def rank() -> None:
        loader._reads = None
        score_nodes(loader)

    taken = [1e3 * s for s in time_on_clock(rank, 5, 2)]
    case, note = f"hotness/{name}/ranking", f"an epoch of {len(loader)} steps takes {epoch:.0f} ms"
    yield Row.of(case, "ranking by expected", "ms", taken, note=note)
    yield Row.of(case, "ranking by expected, of an epoch", "%", [100 * t / epoch for t in taken], note=note)


def measure_drift(num_rows: int, changes: tuple[float, ...] = (0.01, 0.05, 0.2), num_batches: int = 400,
                  device: torch.device | None = None) -> Iterator[Row]:  # fmt: skip
    """Measure hit rates of a tenth of the rows while popular rows change.

    Rows are kept in their first ranking, or chosen again by `follow_reads`, whose moved rows count as misses. A batch
    reads a tenth of the rows, popular ones more often; a share `changes` of them swaps places per batch.
    """
    device = resolve_device(None) if device is None else device
    count, first, period = num_rows // 10, 20, 25
    for change in changes:
        draws = torch.Generator(device).manual_seed(0)
        chance = torch.arange(1, num_rows + 1, device=device, dtype=torch.float32).pow(-0.7)
        kept, follows = ReadCounts(num_rows, first, 1.0, device), ReadCounts(num_rows, period, 0.8, device)
        cached = {"kept": torch.zeros(num_rows, dtype=torch.bool, device=device)}
        cached["following"] = cached["kept"].clone()
        hits = dict.fromkeys([*cached, "best"], 0)
        total = 0
        for number in range(num_batches):
            swapped = torch.randperm(num_rows, generator=draws, device=device)[: int(change * num_rows)]
            chance[swapped] = chance[swapped.roll(1)]
            ids = torch.multinomial(chance, count, generator=draws)
            if number >= 2 * period:
                total += count
                best = torch.zeros_like(cached["kept"])
                best[chance.topk(count).indices] = True
                for way, held in {**cached, "best": best}.items():
                    hits[way] += int(held[ids].sum())
            if kept.note(ids) and number < first:
                cached["kept"][kept.choose(count)] = True
            if follows.note(ids):
                chosen = torch.zeros_like(cached["kept"])
                chosen[follows.choose(count)] = True
                if number >= 2 * period:
                    hits["following"] -= int((chosen & ~cached["following"]).sum())
                cached["following"] = chosen
        for way, title in (("kept", "ranked once, by the first batches"), ("following", "by follow_reads")):
            yield Row.of(f"hotness/drift/{change:.0%} of the rows change a batch", f"hit rate {title}", "",
                         [hits[way] / total], hits["best"] / total, "the most popular rows of each batch",
                         "10% cached; moved rows count as missed")  # fmt: skip
