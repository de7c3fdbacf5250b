"""Gather of rows: from GPU memory beside `torch.index_select`, over the link beside a page-locked copy, and both."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import median

import torch
from torch import Tensor

from pyg_direct.bench.limits import device_copy_rate, pinned_copy_rate, time_on_clock, time_on_gpu
from pyg_direct.bench.result_row import Row
from pyg_direct.features.feature import Feature
from pyg_direct.features.memory_rows import MemoryRows
from pyg_direct.ops.rows.gather_rows import DEFAULT_BLOCKS, blocks_for_rows, gather_rows
from pyg_direct.runtime.cuda.memory import Block, allocate

_IDS = 1 << 20
_MOST_OUT = 2 << 30
WIDTHS = (12, 32, 64, 100, 128, 256, 400, 512, 1024, 2048, 4096, 8192)
_COLD_WIDTHS = (32, 64, 100, 128, 256, 400, 512, 1024, 2048, 4096, 8192)
_ROW_BYTES = "bytes of a row"


def measure_hot_rows(widths: Sequence[int] = WIDTHS, table_bytes: int = 8 << 30) -> Iterator[Row]:
    """Random fp32 rows of a table in GPU memory; `widths` in bytes."""
    limit = device_copy_rate() / 2e12
    memory = torch.empty(table_bytes // 4, device="cuda").normal_()
    for width in widths:
        table = memory[: len(memory) // (width // 4) * (width // 4)].view(-1, width // 4)
        ids = torch.randint(len(table), (min(_IDS, _MOST_OUT // width),), device="cuda")
        out = torch.empty(len(ids), table.shape[1], device="cuda")
        assert torch.equal(gather_rows(table, ids, out=out), table[ids])
        ours = time_on_gpu(partial(gather_rows, table, ids, out=out))
        torch_own = time_on_gpu(partial(torch.index_select, table, 0, ids, out=out))
        for metric, seconds in (("rows, one way", ours), ("torch.index_select", torch_own)):
            yield Row.of(f"gather/hot/{width} B", metric, "TB/s", [len(ids) * width / 1e12 / s for s in seconds], limit,
                         "half of a device copy", curve="hot rows", at=width, at_name=_ROW_BYTES)  # fmt: skip


def measure_cpu_rows(widths: Sequence[int] = (128, 512), table_bytes: int = 1 << 28, out_bytes: int = 1 << 25
                     ) -> Iterator[Row]:  # fmt: skip
    """Random fp32 rows of a table in ordinary memory, by the CPU; `widths` in bytes."""
    for width in widths:
        table = torch.empty(table_bytes // width, width // 4).normal_()
        num_ids = out_bytes // width
        ids = torch.randint(len(table), (num_ids,))
        out, source = torch.empty(num_ids, table.shape[1]), torch.ones(num_ids, table.shape[1])
        assert torch.equal(gather_rows(table, ids, out=out), table[ids])
        ours = time_on_clock(partial(gather_rows, table, ids, out=out))
        torch_own = time_on_clock(partial(torch.index_select, table, 0, ids, out=out))
        limit = out_bytes / 1e9 / median(time_on_clock(partial(out.copy_, source)))
        for metric, seconds in (("rows, one way", ours), ("torch.index_select", torch_own)):
            yield Row.of(f"gather/cpu/{width} B", metric, "GB/s", [out_bytes / 1e9 / s for s in seconds], limit,
                         "a copy of as many bytes")  # fmt: skip


def fill_host_table(num_bytes: int, placement: str) -> tuple[Block, Tensor]:
    """Make a host table of counting int32, and its GPU view."""
    block = allocate(num_bytes, placement, "cuda")
    on_cpu = block.view_on_cpu(torch.int32, (num_bytes // 4,))
    counting = torch.arange(1 << 24, dtype=torch.int32)
    for begin in range(0, len(on_cpu), len(counting)):
        piece = on_cpu[begin : begin + len(counting)]
        # If the table has more than 2**32 items, the numbers wrap around.
        torch.add(counting[: len(piece)], (begin + 2**31) % 2**32 - 2**31, out=piece)
    return block, block.view_on_gpu(torch.int32, (num_bytes // 4,))


def time_cold_rows(memory: Tensor, width: int, *, ascending: bool) -> list[float]:
    """Bytes a second of reading rows of `width` bytes all over a table that counts."""
    table = memory[: len(memory) // (width // 4) * (width // 4)].view(-1, width // 4)
    ids = torch.randint(len(table), (min(_IDS, (256 << 20) // width),), device="cuda")
    ids = ids.sort().values if ascending else ids
    out = torch.empty(len(ids), table.shape[1], dtype=torch.int32, device="cuda")
    read = partial(gather_rows, table, ids, out=out, max_blocks=blocks_for_rows(DEFAULT_BLOCKS, width, width))
    seconds = time_on_gpu(read, 10, 1, 1)
    assert torch.equal(out[:, -1], ((ids + 1) * table.shape[1] - 1).to(torch.int32))
    return [len(ids) * width / s for s in seconds]


def measure_cold_rows(table_bytes: int = 8 << 30) -> Iterator[Row]:
    """Rows of a table in host memory: 512 B and 400 B of each placement and order, and random ones of all widths."""
    limit = pinned_copy_rate() / 1e9
    for placement in ("pinned", "unified"):
        block, memory = fill_host_table(table_bytes, placement)
        for width in (512, 400):
            for order in ("random", "ascending"):
                rates = time_cold_rows(memory, width, ascending=order == "ascending")
                case = f"gather/cold/{width} B/{table_bytes / 2**30:.3g} GiB {placement}/{order}"
                yield Row.of(case, "rows, one way", "GB/s", [r / 1e9 for r in rates], limit, "page-locked copy")
        for width in _COLD_WIDTHS if placement == "unified" else ():
            rates = time_cold_rows(memory, width, ascending=False)
            yield Row.of(f"gather/cold/{width} B/unified", "random rows, one way", "GB/s", [r / 1e9 for r in rates],
                         limit, "page-locked copy", curve="cold rows", at=width, at_name=_ROW_BYTES)  # fmt: skip
        del block, memory
        gc.collect()


class SkewedListing:
    """A graph's neighbors as far as a feature reads them: each row draws its nodes by a power law."""

    def __init__(self, node_count: int, edge_count: int) -> None:
        self.node_count, self.edge_count = node_count, edge_count
        # Nodes are named at random, so that hot ones lie all over the table.
        self._names = torch.randperm(node_count, device="cuda")
        self.indices = self.draw(edge_count)

    def draw(self, count: int) -> Tensor:
        """Nodes drawn by their degree."""
        return self._names[(torch.rand(count, device="cuda") ** 3 * self.node_count).long()]


def measure_cached_rows(num_rows: int = 1 << 23, width: int = 128, cache: str = "20%") -> Iterator[Row]:
    """Distinct nodes drawn by degree, with the hottest rows in GPU memory and the others in unified memory."""
    listing = SkewedListing(num_rows, 16 * num_rows)
    nodes = listing.draw(_IDS).unique()
    out = torch.empty(len(nodes), width, device="cuda")
    table = torch.arange(num_rows, dtype=torch.float32)[:, None].repeat(1, width)
    gpu_table = table.cuda()
    feature = Feature(device_cache_size=cache, csr_topo=listing).from_cpu_tensor(table)
    stored = feature.stored
    assert isinstance(stored, MemoryRows)
    assert stored.directory is not None
    hits = int((stored.directory.bits.view(torch.int32)[nodes // 32] >> (nodes % 32) & 1).sum())
    cold = partial(gather_rows, stored.tier.table, out=out, max_blocks=DEFAULT_BLOCKS)
    for order, ids in (("ascending", nodes), ("shuffled", nodes[torch.randperm(len(nodes), device="cuda")])):
        hot_seconds = time_on_gpu(partial(gather_rows, gpu_table, ids, out=out), 10)
        cold_seconds = time_on_gpu(partial(cold, ids), 10, 2, 2)
        seconds = time_on_gpu(lambda ids=ids: feature[ids], 10, 2, 2)  # type: ignore[misc]
        assert torch.equal(feature[ids][:, -1].long(), ids)
        share = hits / len(ids)
        limit = max(share * sorted(hot_seconds)[5], (1 - share) * sorted(cold_seconds)[5])
        yield Row.of(f"gather/{cache} cached/{4 * width} B/{order}", "time", "ms", [1e3 * s for s in seconds],
                     1e3 * limit, "max(hit bytes / hot rate, miss bytes / cold rate)",
                     f"{share:.0%} of the rows are hits, {stored.max_blocks} blocks")  # fmt: skip
