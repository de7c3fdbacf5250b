"""Epochs with DDP on one, two, four and eight GPUs of a host: all data in GPU memory, or features on the host."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

from pyg_direct.bench.loader import train
from pyg_direct.bench.result_row import Row
from pyg_direct.datasets import synthetic_graph
from pyg_direct.loader.neighbor_loader import NeighborLoader
from pyg_direct.nn.accelerate import accelerate

FANOUTS = [15, 10, 5]
SEEDS, _MORE_SEEDS = 1024, 4096
_MORE_BATCHES, _WARM_UP = 240, 24
# Width of a row and its dtype: in ogbn-papers100M and in MAG240M.
_ROWS_OF_PAPERS = ((128, torch.float32), (768, torch.float16))


def count_up(world: int) -> list[int]:
    """List the numbers of GPUs to measure, up to `world`."""
    return [count for count in (1, 2, 4, 8) if count <= world]


def _count_pieces() -> int:
    """Count the blocks of GPU memory that torch's allocator has requested from the driver so far."""
    return int(torch.cuda.memory_stats()["num_device_alloc"])


class _Epochs:
    """Epochs of a GraphSAGE over batches shared by some of the processes."""

    def __init__(self, rank: int, groups: dict[int, Any], data: Data, train_idx: Tensor, num_classes: int,
                 hidden: int, is_replayed: bool = False, seeds: int = SEEDS) -> None:  # fmt: skip
        self.rank, self.data, self.train_idx, self.num_classes = rank, data, train_idx, num_classes
        self.hidden, self.is_replayed, self.seeds = hidden, is_replayed, seeds
        self.groups = groups
        # Per epoch of the latest run: seconds to the first batch, and blocks of memory requested from the driver.
        self.begins: list[float] = []
        self.pieces: list[int] = []

    def describe(self) -> str:
        """Describe the start of the latest run's epochs; empty in processes that waited."""
        if not self.begins:
            return ""
        first, pieces = 1e3 * median(self.begins), median(self.pieces)
        return f"; first batch after {first:.1f} ms, {pieces} new pieces of memory"

    def run(self, count: int, epochs: int = 3, **options: Any) -> list[float]:
        """Measure seconds of each epoch with `count` processes; empty in processes that wait."""
        seconds: list[float] = []
        self.begins, self.pieces = [], []
        if self.rank < count:
            loader = NeighborLoader(self.data, FANOUTS, self.train_idx, batch_size=self.seeds, shuffle=True, seed=0,
                                    drop_last=True, ranks=(self.rank, count), **options)  # fmt: skip
            torch.manual_seed(0)
            model = GraphSAGE(self.data.x.shape[1], self.hidden, 3, self.num_classes).to(loader.device)
            if self.is_replayed:
                accelerate(model, replay=True)
            parallel = DistributedDataParallel(model, process_group=self.groups[count], gradient_as_bucket_view=True)
            optimizer = torch.optim.Adam(parallel.parameters(), fused=True)
            for epoch in range(1 + epochs):
                torch.cuda.synchronize()
                dist.barrier(self.groups[count])
                pieces, begin = _count_pieces(), time.perf_counter()
                for number, batch in enumerate(loader):
                    if epoch > 0 and number == 0:
                        self.begins.append(time.perf_counter() - begin)
                    train(parallel, optimizer, batch)
                    if epoch == 0 and number == _WARM_UP:
                        # Only a warm-up.
                        break
                torch.cuda.synchronize()
                dist.barrier(self.groups[count])
                if epoch > 0:
                    seconds.append(time.perf_counter() - begin)
                    self.pieces.append(_count_pieces() - pieces)
            del loader, model, parallel, optimizer
            # A loader is part of a cycle: otherwise its host memory would be freed during the next epochs.
            gc.collect()
            torch.cuda.empty_cache()
        dist.barrier()
        return seconds


def _hash_batches(rank: int, count: int, data: Data, train_idx: Tensor, num_batches: int = 8) -> int:
    """Hash the first global batches to one number that does not depend on the processes."""
    total = torch.zeros((), dtype=torch.int64, device="cuda")
    if rank < count:
        loader = NeighborLoader(data, FANOUTS, train_idx, batch_size=1024, shuffle=True, seed=0, placement="cuda",
                                ranks=(rank, count))  # fmt: skip
        for step, batch in zip(range(num_batches // count), loader, strict=False):
            weight = torch.arange(1, batch.e_id.numel() + 1, device="cuda")
            number = rank + step * count
            total += (number + 1) * ((weight * (batch.e_id + 1)).sum() + (batch.x.double() * 1024).long().sum())
    dist.all_reduce(total)
    return int(total)


def measure_products(rank: int, world: int, scale: float, groups: dict[int, Any],
                      note: Callable[[Row], None]) -> None:  # fmt: skip
    """Measure epochs on a graph of ogbn-products' shape: all data in GPU memory, and features on the host."""
    graph = synthetic_graph("products", scale=scale, device="cuda")
    train_idx, num_classes = graph.train_idx.cpu(), graph.num_classes
    on_gpu = graph.to_data()
    hashes = {count: _hash_batches(rank, count, on_gpu, train_idx) for count in count_up(world)}
    assert len(set(hashes.values())) == 1, f"batches differ: {hashes}"
    note(Row.of(f"multi_gpu/batches/products/{world} GPUs", "numbers of GPUs with equal batches", "GPUs",
                [float(len(hashes))],
                note=f"ids and features of the first 8 global batches sum to {hashes[1]}"))  # fmt: skip
    _compare(rank, world, _Epochs(rank, groups, on_gpu, train_idx, num_classes, 256), "products/all in GPU memory",
             note, placement="cuda")  # fmt: skip


def measure_papers(rank: int, world: int, scale: float, groups: dict[int, Any],
                    note: Callable[[Row], None]) -> None:  # fmt: skip
    """Measure epochs on a graph of ogbn-papers100M's shape, at scale 1 a twentieth, features on the host, 20 % cached.

    Seeds are a twentieth of its training nodes, or more. With more seeds, filling the pipeline takes a share of an
    epoch closer to the whole graph's, whose epochs have 1,179 batches. The latter are also measured with rows of
    MAG240M's width, and with more seeds per batch. Models are accelerated and their passes replayed, so that steps wait
    for rows. With 1,024 seeds and two fifths of the rows cached, a step still takes Python's time.
    """
    graph = synthetic_graph("papers100M", scale=0.05 * scale, device="cuda", topology_only=True)
    shape = f"papers100M x {0.05 * scale:g}"
    train_idx, num_nodes = graph.train_idx.cpu(), graph.num_nodes
    mixed_idx = torch.randperm(num_nodes, generator=torch.Generator().manual_seed(0))
    placed: dict[str, Any] = {"placement": "unified", "topology_placement": "cuda"}
    for width, dtype in _ROWS_OF_PAPERS:
        data = Data(edge_index=graph.edge_index, y=graph.y, num_nodes=num_nodes)
        data.x = torch.empty(num_nodes, width, dtype=dtype)
        data.x.copy_((torch.arange(num_nodes) % 64 / 64)[:, None].expand(num_nodes, width))
        assert num_nodes >= _MORE_BATCHES * _MORE_SEEDS, f"a graph of {num_nodes} nodes has too few seeds"
        more = f"{shape}, {_MORE_BATCHES} batches"
        shapes = [
            (shape, train_idx, SEEDS),
            (more, mixed_idx[: _MORE_BATCHES * SEEDS], SEEDS),
            (f"{more} of {_MORE_SEEDS} seeds", mixed_idx[: _MORE_BATCHES * _MORE_SEEDS], _MORE_SEEDS),
        ]
        if dtype != torch.float32:
            shapes = [(f"{more}, rows of {width} x {dtype.itemsize} B", *shapes[1][1:])]
        for begin, ids, seeds in shapes:
            epochs = _Epochs(rank, groups, data, ids, graph.num_classes, 32, is_replayed=True, seeds=seeds)
            name = f"{begin}, features on the host, hidden 32"
            _compare(rank, world, epochs, f"{name}/no cache", note, **placed)
            alone = _compare(rank, 1, epochs, f"{name}/20 % on each GPU", note, feature_cache="20%", **placed)
            for policy in ("device_replicate", "p2p_clique_replicate")[: 2 * (world > 1)]:
                seconds = epochs.run(world, feature_cache="20%", cache_policy=policy, **placed)
                _note_epochs(f"{name}/20 % on each GPU, {policy}", world, seconds or [1.0], alone, note,
                             epochs.describe())  # fmt: skip
        del data, epochs


def _compare(rank: int, world: int, epochs: _Epochs, name: str, note: Callable[[Row], None], **options: Any) -> float:
    """Measure epochs with 1, 2, ... processes; return the seconds of one with one process, in the first process."""
    alone = 0.0
    for count in count_up(world):
        seconds = epochs.run(count, **options)
        if count == 1:
            alone = median(seconds or [0.0])
        if rank == 0:
            _note_epochs(name, count, seconds, alone, note, epochs.describe())
    return alone


def _note_epochs(name: str, count: int, seconds: list[float], alone: float, note: Callable[[Row], None],
                 words: str) -> None:  # fmt: skip
    """Note rows of epochs with `count` processes; with one process an epoch takes `alone` seconds. `words` add
    details.
    """
    case = f"multi_gpu/epoch/{name}"
    note(Row.of(case, f"{count} GPUs", "s", seconds, alone / count, "one GPU over N",
                f"{alone / median(seconds):.2f} times as fast as one GPU{words}"))  # fmt: skip
    note(Row.of(f"{case}/speed-up/{count}", name, "x", [alone / value for value in seconds], count, "as many GPUs",
                curve="speed-up of epochs", at=count, at_name="GPUs"))  # fmt: skip
