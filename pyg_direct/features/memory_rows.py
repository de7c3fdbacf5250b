"""Rows in memory: the hot ones over the tier that has all of them, read by one kernel in place.

`place_rows` chooses the memory for the rows of a table: GPU memory as far as it is given to hot rows, then host memory.
`Served` counts reads and hits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from pyg_direct.compiler.jit import SIMULATED
from pyg_direct.features.hot_rows import (
    Listing,
    ReadCounts,
    check_scores,
    choose_hottest,
    copy_to_gpu,
    fit_budget,
    shrink_budget,
)
from pyg_direct.features.row_dtypes import narrow_rows
from pyg_direct.features.tier_report import TierReport
from pyg_direct.features.tiers.base import ReadErrors, TableTier
from pyg_direct.features.tiers.choice import open_table
from pyg_direct.features.tiers.in_memory import STRANDS, PeerTier
from pyg_direct.kernels.batch_counters import NO_POSITION
from pyg_direct.ops.local_ids.relabel_nodes import locate_ids
from pyg_direct.ops.rows.gather_rows import (
    DEFAULT_BLOCKS,
    Directory,
    Gather,
    RowReader,
    blocks_beside_hot,
    blocks_for_rows,
    check_widening,
    choose_gather,
    gather_rows,
    keep_last,
    scatter_rows,
    select_rows,
    unread_errors,
)
from pyg_direct.runtime.cuda.graph_capture import note_reader
from pyg_direct.runtime.cuda.memory import check_filled, move
from pyg_direct.runtime.host.host_memory import parse_size


class Served:
    """Counts of reads, on the device and without a wait: rows read, and how many of them were hot."""

    def __init__(self, device: torch.device) -> None:
        self.num_read, self.num_hot = 0, torch.zeros((), dtype=torch.int64, device=device)


class MemoryRows:
    """Hot rows over a tier that kernels read in place. The directory has a bit for each id. If the bit is set, the
    number of bits before it is the position of the row among the hot rows; otherwise the row is read from the tier.

    Args:
        hot: The hot rows, ascending by id; None if `tier` serves all.
        exponents: Exponents of float8 rows, uint8 `[N]`, in memory that kernels read.
        misses: Share of all reads that goes to other rows than hot ones.
        link_blocks: Thread blocks that keep the link busy; None takes `DEFAULT_BLOCKS`.

    Attributes:
        max_blocks: Cap of the grid of a read over the link; None for none.
        errors: Word in which kernels report bad ids; None on a CPU.
        served: Counts of reads; None if they are not counted.
        following: Counts from which hot rows are chosen again; None if hot rows stay.
    """

    served: Served | None = None
    following: ReadCounts | None = None
    max_blocks: int | None = None
    _reader: RowReader | None = None

    def __init__(self, tier: TableTier, device: torch.device, dtype: torch.dtype, *, hot: TableTier | None = None,
                 directory: Directory | None = None, exponents: Tensor | None = None, misses: float = 1.0,
                 link_blocks: int | None = None) -> None:  # fmt: skip
        self.tier, self.hot, self.directory = tier, hot, directory
        self.device, self.dtype, self.exponents = device, dtype, exponents
        self.errors = ReadErrors(True) if device.type == "cuda" else None
        if tier.table.is_cuda and not tier.is_gpu_memory:
            blocks = link_blocks or DEFAULT_BLOCKS
            if tier.table.numel() > 0:
                width = tier.table[0].numel()
                blocks = blocks_for_rows(blocks, width * tier.table.element_size(), width * dtype.itemsize)
            self.limit_blocks(blocks_beside_hot(blocks, misses, isinstance(hot, PeerTier)))
            note_reader(self, tier.table.get_device(), self.max_blocks or 0)

    def limit_blocks(self, blocks: int) -> None:
        """Use so many thread blocks for reads over the link from now on."""
        self.max_blocks, self._reader = blocks, None

    @property
    def shape(self) -> torch.Size:
        """Of the table, `[N, ...]`."""
        return self.tier.shape

    @property
    def placement(self) -> str:
        """Place of the rows that are not in GPU memory; `cuda` when all are there."""
        return self.device.type if self.tier.is_gpu_memory else self.tier.placement

    @property
    def is_on_gpu(self) -> bool:
        """True if kernels of a GPU read them."""
        return self.tier.device.type == "cuda"

    @property
    def _nearest(self) -> TableTier:
        """Tier of the hot rows; the tier of all rows if it serves all."""
        return self.tier if self.hot is None else self.hot

    @property
    def num_hot_rows(self) -> int:
        """Rows in GPU memory."""
        return self._nearest.shape[0] if self._nearest.is_gpu_memory else 0

    @property
    def num_writes(self) -> int:
        """Writes that torch has seen to a table on the CPU."""
        return 0 if self.is_on_gpu or self.tier.table.is_inference() else self.tier.table._version

    @property
    def whole(self) -> Tensor | None:
        """Return the table, `[N, ...]` of `dtype`, if memory of the device holds it whole; otherwise None."""
        is_here = self.tier.is_gpu_memory or self.device.type == "cpu"
        return self.tier.table if is_here and self.tier.dtype == self.dtype else None

    def list_stored(self) -> Tensor:
        """Return all rows as they are stored, `[N, ...]`, on the host unless all are in GPU memory."""
        block = self.tier.block
        if block is None or not self.is_on_gpu:
            return self.tier.table
        return block.view_on_cpu(self.tier.dtype, self.tier.shape)

    def lie_in(self, table: Tensor) -> bool:
        """Report whether all rows are read from the memory of a table, `[N, ...]` of any dtype."""
        if self.tier.dtype != table.dtype:
            return False
        own, block, place = self.tier.table, self.tier.block, table.data_ptr()
        if self.is_on_gpu and block is not None:
            return self.hot is None and block.address == place
        return own.data_ptr() == place and own.stride() == table.stride()

    def use_table(self, table: Tensor) -> None:
        """Read from now on another table that stores the same rows."""
        self.tier = open_table(table, self.tier.block)

    def own_rows(self) -> None:
        """Read from now on copies of the rows, which no block owns."""
        self.use_table(self.tier.table.clone())
        self.exponents = None if self.exponents is None else self.exponents.clone()

    def copy(self) -> MemoryRows:
        """Return another reader of the same rows; each reports only its own errors."""
        made = copy.copy(self)
        made.following = made._reader = None
        made.errors = None if self.errors is None else ReadErrors(True)
        return made

    def check(self) -> None:
        """Refuse to read on after a bad id, or in a forked child."""
        self.raise_earlier_error()
        if self.tier.block is not None:
            self.tier.block.check_process()

    def raise_earlier_error(self) -> None:
        """Raise the error that an earlier read on a GPU has met."""
        if self.errors is not None:
            self.errors.raise_first("node_idx", self.tier.shape[0])

    def take(self, ids: Tensor) -> Tensor:
        """Read rows of ids on the device, which were checked or which a kernel checks, `[n, ...]` of `dtype`."""
        return self.gather(ids, None if self.errors is None else self.errors.word)

    def gather(self, ids: Tensor, errors: Tensor | None) -> Tensor:
        """Return rows of ids, `[n, ...]` of `dtype` on the device; see `Feature.gather`."""
        if self.served is not None:
            self.count(ids)
        if self.following is not None:
            self.following.order_reads(self.device)
        cold = None if self.hot is None else self.tier.table
        rows = gather_rows(self._nearest.table, ids if self.is_on_gpu else ids.cpu(), cold=cold,
                           directory=self.directory, errors=errors, max_blocks=self.max_blocks, dtype=self.dtype,
                           exponents=self.exponents)  # fmt: skip
        if not self.is_on_gpu:
            return rows.to(self.device)
        if self.following is not None and self.following.note(ids):
            self._choose_anew(self.following)
        return rows

    def read(self, ids: Tensor) -> Tensor:
        """Return rows of ids that a sampler made, `[n, ...]` of `dtype`."""
        rows = self.read_sampled(ids)
        if rows is not None:
            return rows
        self.check()
        return self.take(ids)

    def read_sampled(self, ids: Tensor) -> Tensor | None:
        """Read rows of ids with few steps on the host, `[n, ...]` of `dtype`; ids are int64 `[n]`, contiguous and on
        the device. Return None if `take` has to read them.
        """
        if self._reader is None:
            if self.following is not None:
                return None
            table = self.tier.table
            if not table.is_cuda or not ids.is_cuda:
                is_plain = self.hot is None and self.served is None and table.dtype == self.dtype
                return select_rows(table, ids) if is_plain and self.device.type == "cpu" else None
            assert self.errors is not None
            cold = None if self.hot is None else table
            strands = STRANDS if isinstance(self._nearest, PeerTier) else 1
            self._reader = RowReader(self._nearest.table, cold, self.directory, self.errors.word, self.max_blocks,
                                     dtype=self.dtype, exponents=self.exponents, strands=strands)  # fmt: skip
        if self.served is not None:
            self.count(ids)
        if self.errors is not None and self.errors.position.value != NO_POSITION:
            self.raise_earlier_error()
        if self.tier.block is not None:
            self.tier.block.check_process()
        return self._reader.read(ids)

    @property
    def can_be_captured(self) -> bool:
        """True if kernels alone read all rows, so that a graph may capture the read."""
        return (self.is_on_gpu or SIMULATED) and self.following is None

    def find_tables(self) -> tuple[int, ...]:
        """Return the addresses of the tables: a captured read serves as long as they stay."""
        return self._nearest.table.data_ptr(), self.tier.table.data_ptr(), self.max_blocks or 0

    def open_gather(self, address: int) -> Gather:
        """Return the read of rows on torch's current stream: (unchecked ids, address of the rows) -> None."""
        cold = None if self.hot is None else self.tier.table
        errors = unread_errors(self.device) if self.errors is None else self.errors.word
        exponents = check_widening(self.tier.dtype, self.dtype, self.exponents, self.shape[0], self.device)
        return choose_gather(self._nearest.table, cold, self.directory, self.dtype, exponents, errors, self.max_blocks,
                             address)  # fmt: skip

    def write(self, ids: Tensor, rows: Tensor) -> None:
        """Replace rows in the tier, and their hot copies too; of an id that comes several times, the last row counts.
        Ids and rows, of `dtype`, are on the device of the tier's table.
        """
        errors = None if self.errors is None else self.errors.word
        table = self.tier.table
        ids, rows = keep_last(ids.contiguous(), rows.contiguous())
        if table.dtype != self.dtype:
            rows, exponents = narrow_rows(rows, table.dtype)
            if exponents is not None:
                assert self.exponents is not None
                scatter_rows(self.exponents, ids, exponents, errors=errors, is_unique=True)
        scatter_rows(table, ids, rows, errors=errors, is_unique=True)
        if self.hot is not None and self.directory is not None:
            places = locate_ids(ids, self.directory, table.shape[0])
            # Rows that are not hot have no position, which is no error.
            scatter_rows(self.hot.table, places, rows, errors=unread_errors(table.device), is_unique=True)

    def follow(self, period: int, fade: float) -> None:
        """Choose the hot rows again after every `period` reads; 0 stops. See `Feature.follow_reads`."""
        self.following = self._reader = None
        if period > 0 and self.hot is not None:
            self.following = ReadCounts(self.shape[0], period, fade, self.device)

    def _choose_anew(self, following: ReadCounts) -> None:
        assert self.hot is not None
        assert self.directory is not None
        hot, directory, cold = self.hot.table, self.directory, self.tier.table
        chosen = following.choose(len(hot))
        self.hot = open_table(gather_rows(hot, chosen, cold=cold, directory=directory, max_blocks=self.max_blocks))
        self.directory = Directory.of(chosen, len(cold))
        self._reader = None
        following.hand_over([hot, *directory], self.device)

    def count_served(self, served: Served | None) -> None:
        """Count reads and hits in `served` from now on; None stops."""
        self.served = served
        for tier in (self.hot, self.tier):
            if tier is not None:
                tier.count_served(served is not None)

    def count(self, ids: Tensor) -> None:
        """Count a read."""
        assert self.served is not None
        self.served.num_read += ids.numel()
        nearest = self._nearest
        if self.directory is None and not isinstance(nearest, PeerTier):
            return
        places = ids.to(self.device)
        if self.directory is not None:
            places = locate_ids(places, self.directory, self.shape[0])
            self.served.num_hot += (places >= 0).sum()
        if isinstance(nearest, PeerTier):
            nearest.note_read(places)

    @property
    def num_read(self) -> int:
        """Rows that were read since counting began."""
        return 0 if self.served is None else self.served.num_read

    def count_hot(self, num_read: int) -> int:
        """Return how many of the rows that were read came from memory of GPUs; waits for the GPU."""
        if self.directory is not None and self.served is not None:
            return int(self.served.num_hot)
        return num_read if self.tier.is_gpu_memory else 0

    def describe(self, num_read: int, is_counted: bool, link: str | None) -> list[TierReport]:
        """Return lines of a report, nearest tier first; `link` connects the GPU to rows of the host."""
        num_hot, hot_read, lines = self.num_hot_rows, self.count_hot(num_read), []
        for tier, num_rows, tier_read in ((self._nearest, num_hot, hot_read),
                                          (self.tier, self.shape[0] - num_hot, num_read - hot_read)):  # fmt: skip
            if num_rows > 0:
                lines += tier.describe(num_rows, tier_read if is_counted else None, link)
        return lines


def check_placing(rows: Tensor, device: torch.device, dtype: torch.dtype, asked: int | str, *, hotness: str | Tensor,
                  csr_topo: Listing | None, is_for_many: bool) -> None:  # fmt: skip
    """Refuse rows `[N, ...]` that need a ranking which `hotness` and `csr_topo` do not give."""
    if rows.device == device and not is_for_many:
        # All rows of this GPU stay there, whatever the ranking.
        return
    num_bytes = rows.numel() * dtype.itemsize
    if device.type == "cuda" and 0 < parse_size(asked, num_bytes) < num_bytes:
        check_scores(hotness, csr_topo, len(rows))


def place_rows(source: Tensor, device: torch.device, dtype: torch.dtype, asked: int | str, placement: str,
               rank: Callable[[], Tensor | None], *, exponents: Tensor | None = None,
               link_blocks: int | None = None) -> MemoryRows:  # fmt: skip
    """Put rows into memory: the hottest that fit into GPU memory, and all rows on the host if not all fit.

    Args:
        source: `[N, ...]` of any dtype, which becomes a view of the host memory if possible.
        asked, placement: The `device_cache_size` and `placement` of a `Feature`.
        rank: Computes scores of the rows, `[N]`; None for none.
    """
    rows = source.detach().resolve_conj().resolve_neg()
    if device.type == "cpu":
        return MemoryRows(open_table(rows.cpu().contiguous()), device, dtype, exponents=exponents)
    if rows.is_cuda and rows.device == device:
        return MemoryRows(open_table(rows.contiguous()), device, dtype, exponents=exponents)
    num_bytes = rows.numel() * rows.element_size()
    budget = fit_budget(min(num_bytes, parse_size(asked, num_bytes)), asked, device)
    if budget >= num_bytes:
        hot = copy_to_gpu(rows, None, device)
        if hot is not None:
            return MemoryRows(open_table(hot), device, dtype, exponents=exponents)
        budget = shrink_budget(num_bytes, asked)
    scores = rank() if budget > 0 else None
    while True:
        hot_ids, misses = choose_hottest(scores, len(rows), budget * len(rows) // num_bytes)
        hot = copy_to_gpu(rows, hot_ids, device)
        if hot is not None:
            break
        budget = shrink_budget(budget, asked)
    if not source.is_contiguous() or source.requires_grad or source.is_conj() or source.is_neg():
        source = rows.contiguous()
    # Memory that a second tensor views is not freed while it is moved.
    del rows
    block = move(source, placement, device, what="features")
    if block.placement == "cpu":
        exponents = None if exponents is None else exponents.cpu()
        return MemoryRows(open_table(source.detach(), block), device, dtype, exponents=exponents)
    check_filled(block, "features")
    cold = open_table(block.view_on_gpu(source.dtype, source.shape, device), block)
    if hot_ids.numel() == 0:
        return MemoryRows(cold, device, dtype, exponents=exponents, misses=misses, link_blocks=link_blocks)
    directory = Directory.of(hot_ids.to(device), source.shape[0]).wait()
    return MemoryRows(cold, device, dtype, hot=open_table(hot), directory=directory, exponents=exponents, misses=misses,
                      link_blocks=link_blocks)  # fmt: skip
