"""Several GPUs of one host: rows by cache policy, sampling, and epochs (`ddp`), beside NVLink and PCIe of the same run.

One process per GPU; in runs with fewer GPUs, the remaining processes wait.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from torch_geometric.data import Data

from benchmarks.distributed.ddp import FANOUTS, count_up, measure_papers, measure_products
from benchmarks.distributed.exchange import end_processes
from pyg_direct.bench.gather import SkewedListing
from pyg_direct.bench.result_row import Row
from pyg_direct.datasets import synthetic_graph
from pyg_direct.features.feature import Feature
from pyg_direct.features.tiers.in_memory import STRANDS
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.loader.neighbor_loader import NeighborLoader
from pyg_direct.ops.rows.gather_rows import RowReader, unread_errors
from pyg_direct.runtime.comm.formation import stay_on_host

_NUM_ROWS, _WIDTH, _NUM_READS = 1 << 21, 128, 1 << 19
CACHES = ("20%", "40%", "60%")
# Numbers of simultaneous read positions in a list of ids, in addition to the feature's own choice.
PLACES = (1, 16, 64, 256, 1024)
# Parts of the measurement, in this order.
PARTS = ("rows", "batches", "products", "papers")
_NUM_SAMPLES = 60


def measure_multi_gpu(scale: float, parts: Sequence[str] = PARTS) -> Iterator[Row]:
    """Measure rows of 1, 2, 4, ... GPUs, up to all.

    Args:
        scale: Factor on the sizes of graphs.
        parts: Some of `PARTS`.
    """
    count = torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        context = spawn(_work, args=(count, folder, scale, parts), nprocs=count, join=False)
        file, given, is_done = Path(folder) / "rows", 0, False
        try:
            while not is_done:
                # As they arrive, so that an interrupted run leaves its rows.
                is_done = context.join(1)
                rows = torch.load(file, weights_only=False) if file.exists() else []
                yield from rows[given:]
                given = len(rows)
        finally:
            end_processes(context)


def _work(rank: int, world: int, folder: str, scale: float, parts: Sequence[str]) -> None:
    torch.cuda.set_device(rank)
    stay_on_host()
    dist.init_process_group("nccl", init_method=f"file://{folder}/group", rank=rank, world_size=world,
                            device_id=torch.device("cuda", rank))  # fmt: skip
    rows: list[Row] = []

    def note(row: Row) -> None:
        rows.append(row)
        if rank == 0:
            torch.save(rows, Path(folder) / "new")
            (Path(folder) / "new").rename(Path(folder) / "rows")

    limits = _measure_limits(rank, world)
    for part, read in (("rows", _measure_rows), ("batches", _measure_rows_of_batches)):
        if part in parts:
            read(rank, world, scale, limits, note)
    groups = {count: dist.new_group(list(range(count))) for count in count_up(world)}
    for part, train in (("products", measure_products), ("papers", measure_papers)):
        if part in parts:
            train(rank, world, scale, groups, note)
    dist.barrier()
    dist.destroy_process_group()


def _together(work: Callable[[], Any], repeats: int = 5) -> list[float]:
    """Measure the seconds of the slowest process for `work`, which all processes do at once."""
    work()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds = torch.tensor(time.perf_counter() - begin, device="cuda")
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        times.append(float(seconds))
    return times


def _measure_limits(rank: int, world: int) -> dict[str, float]:
    """Measure bytes a second of three copies.

    One runs between two GPUs, one from the next GPU to each GPU at once, and one from page-locked memory to all at
    once.
    """
    num_bytes = 1 << 30
    on_gpu = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    on_host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    pcie = num_bytes / median(_together(lambda: on_gpu.copy_(on_host, non_blocking=True), 3))
    peer = peers = 0.0
    if world > 1:
        other = torch.empty(num_bytes, dtype=torch.uint8, device=f"cuda:{(rank + 1) % world}")
        peers = num_bytes / median(_together(lambda: on_gpu.copy_(other), 3))
        if rank == 0:
            seconds = []
            for _ in range(4):
                torch.cuda.synchronize(other.device)
                begin = time.perf_counter()
                for _ in range(4):
                    on_gpu.copy_(other)
                torch.cuda.synchronize(0)
                seconds.append((time.perf_counter() - begin) / 4)
            peer = num_bytes / min(seconds)
        found = torch.tensor(peer, device="cuda")
        dist.broadcast(found, 0)
        peer = float(found)
    return {"peer": peer, "peers": peers, "pcie": pcie}


def count_peer_bytes(feature: Feature, ids: Tensor) -> int:
    """Count the bytes of the rows `ids` in the memory of other GPUs than the feature's."""
    handle = feature.share_ipc()
    number = handle.find_hot(feature.device)
    if number is None or handle.hot[number].spread is None:
        return 0
    hot, spread = handle.hot[number], handle.hot[number].spread
    assert spread is not None
    slots = ids.cpu()
    directory = hot.open_directory()
    if directory is not None:
        words = directory.bits.view(torch.int32).long() & 0xFFFFFFFF
        below = (1 << (slots % 32)) - 1
        is_hot = words[slots // 32] >> (slots % 32) & 1 == 1
        bits = words[slots // 32] & below
        counts = sum((bits >> k & 1) for k in range(32))
        slots = (directory.ranks.long()[slots // 32] + counts)[is_hot]
    row_bytes = handle.rows[0].numel() * handle.stored.itemsize
    owners = torch.tensor([chunk.owner for chunk in spread.chunks])
    chunk = slots * row_bytes // spread.chunks[0].num_bytes
    return int((owners[chunk] != feature.device.index).sum()) * row_bytes


def _measure_rows(rank: int, world: int, scale: float, limits: dict[str, float], note: Callable[[Row], None]) -> None:
    """Measure rows of distinct nodes, drawn by degree, ascending."""
    num_rows = int(_NUM_ROWS * scale)
    torch.manual_seed(5)
    listing = SkewedListing(num_rows, 8 * num_rows)
    torch.manual_seed(rank)
    ids = listing.draw(_NUM_READS).unique()
    _compare_policies(rank, world, f"rows/{world} GPUs", (listing, num_rows), ids, CACHES, limits, note)


def _measure_rows_of_batches(rank: int, world: int, scale: float, limits: dict[str, float],
                             note: Callable[[Row], None]) -> None:  # fmt: skip
    """Measure sampling of a graph of ogbn-products' shape, and rows of the nodes of a batch, a different one for each
    GPU.
    """
    graph = synthetic_graph("products", scale=scale, device="cuda", topology_only=True)
    data = Data(edge_index=graph.edge_index, num_nodes=graph.num_nodes)
    loader = NeighborLoader(data, FANOUTS, graph.train_idx.cpu(), batch_size=1024, shuffle=True, seed=rank)
    ids = next(iter(loader)).n_id
    _measure_sampling(world, data, graph.train_idx.cpu(), rank, note)
    listing = CSRTopo(graph.edge_index, num_nodes=graph.num_nodes)
    del loader, data
    table = listing, graph.num_nodes
    _compare_policies(rank, world, f"rows of a batch/products/{world} GPUs", table, ids, CACHES[:1], limits, note)


def _measure_sampling(world: int, data: Data, train_idx: Tensor, seed: int, note: Callable[[Row], None]) -> None:
    """Measure edges that all GPUs sample at once, from a topology in the memory of each, and from a shared one."""
    for placement in ("cuda", "peer")[: 1 + (world > 1)]:
        loader = NeighborLoader(data, FANOUTS, train_idx, batch_size=1024, shuffle=True, seed=seed,
                                topology_placement=placement)  # fmt: skip
        edges: list[int] = []

        def sample(loader: NeighborLoader = loader, edges: list[int] = edges) -> None:
            sizes = [batch.edge_index.shape[1] for _, batch in zip(range(_NUM_SAMPLES), loader, strict=False)]
            edges.append(sum(sizes))

        seconds = _together(sample)
        counted = torch.tensor(edges[1:], dtype=torch.float64, device="cuda")
        dist.all_reduce(counted)
        note(Row.of(f"multi_gpu/sampling/products/{world} GPUs/topology {placement}", "edges of all GPUs", "G/s",
                    [total / 1e9 / s for total, s in zip(counted.tolist(), seconds, strict=True)],
                    note=f"1,024 seeds, {FANOUTS}, {_NUM_SAMPLES} batches for each GPU, no features"))  # fmt: skip
        del loader, sample


def _compare_policies(rank: int, world: int, name: str, table: tuple[Any, int], ids: Tensor, caches: Sequence[str],
                      limits: dict[str, float], note: Callable[[Row], None]) -> None:  # fmt: skip
    """Measure rates of reading rows, all GPUs at once, for each policy and cache.

    Args:
        table: Ranking of its rows, and their number.
    """
    listing, num_rows = table
    num_bytes = len(ids) * _WIDTH * 4
    host = torch.empty(num_rows, _WIDTH)
    if rank == 0:
        host.copy_(torch.arange(num_rows, dtype=torch.float32)[:, None].expand(-1, _WIDTH))
    for policy in ("device_replicate", "p2p_clique_replicate")[: 1 + (world > 1)]:
        for cache in caches:
            begin = time.perf_counter()
            feature = Feature(device=rank, device_list="group", device_cache_size=cache, cache_policy=policy,
                              csr_topo=listing, cold_policy="unified").from_cpu_tensor(host)  # fmt: skip
            seconds = time.perf_counter() - begin
            assert torch.equal(feature[ids][:, -1].long(), ids), f"wrong rows by {policy} with {cache}"
            rates = [8 * num_bytes / 1e9 / s for s in _together(lambda f=feature: [f.read(ids) for _ in range(8)])]  # type: ignore[misc]
            from_peers = torch.tensor(float(count_peer_bytes(feature, ids)), device="cuda")
            dist.all_reduce(from_peers)
            is_whole = policy != "device_replicate" and feature.placement == "cuda"
            limit = world / (world - 1) * limits["peer"] if is_whole else None
            note(Row.of(f"multi_gpu/{name}/{policy}", f"{cache} of the rows for each GPU", "GB/s", rates,
                        None if limit is None else limit / 1e9, "N/(N-1) times a peer copy" if limit else "",
                        f"for each GPU, all at once; {float(from_peers) / world / num_bytes:.0%} of the bytes are a "
                        f"peer's; made in {seconds:.1f} s; a page-locked copy to each GPU at once "
                        f"{limits['pcie'] / 1e9:.0f} GB/s, a peer copy {limits['peer'] / 1e9:.0f}, all such copies at "
                        f"once {limits['peers'] / 1e9:.0f}"))  # fmt: skip
            if limit is not None:
                _try_places(feature, ids, f"multi_gpu/{name}/{policy}/{cache}", limit, note)
            del feature
            gc.collect()
            torch.cuda.empty_cache()
            dist.barrier()


def _try_places(feature: Feature, ids: Tensor, case: str, limit: float, note: Callable[[Row], None]) -> None:
    """Measure rates of rows that all lie in the memory of a clique, by the number of simultaneous read positions."""
    table = feature.whole
    assert table is not None, "rows on the host have no places to be read from"
    num_bytes = len(ids) * table[0].numel() * table.element_size()
    for places in PLACES:
        reader = RowReader(table, None, None, unread_errors(table.device), None, strands=places)
        assert torch.equal(reader.read(ids), feature.read(ids)), f"wrong rows from {places} places"
        rates = [8 * num_bytes / 1e9 / s for s in _together(lambda r=reader: [r.read(ids) for _ in range(8)])]  # type: ignore[misc]
        note(Row.of(f"{case}/places", f"read from {places} places at once", "GB/s", rates, limit / 1e9,
                    "N/(N-1) times a peer copy", f"for each GPU, all at once; features take {STRANDS}"))  # fmt: skip
