"""Rows that training reads and replaces: the hot ones in GPU memory over a table in any memory.

`TrainedRows` are the rows of an embedding, or the numbers that an optimizer keeps for each of its rows. A table on the
host is read and written in place by kernels of the GPU. Hot rows are chosen once, as for a `Feature`. Each write of an
embedding goes to the hot copy and to the table, so that the parameter always has all rows. Numbers of an optimizer are
read by the optimizer alone. Of their hot rows only the copies are written, which saves the way over the link.

`place_trained` chooses the memory of a new table. `hold_rows` and `find_rows` connect a parameter with its rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils.weak import WeakTensorKeyDictionary

from pyg_direct.errors import ArgumentError, DeviceError, MemoryLimitError
from pyg_direct.features.hot_rows import Listing, choose_hottest, fit_budget, score_rows
from pyg_direct.ops.local_ids.relabel_nodes import locate_ids
from pyg_direct.ops.rows.gather_rows import (
    DEFAULT_BLOCKS,
    Directory,
    blocks_beside_hot,
    blocks_for_rows,
    gather_rows,
    scatter_rows,
    unread_errors,
)
from pyg_direct.progress import show_wait
from pyg_direct.runtime.cuda.device import budget_of, free_bytes
from pyg_direct.runtime.cuda.memory import Block, allocate_or_fall_back, choose_host_memory
from pyg_direct.runtime.host.host_memory import parse_size

PLACEMENTS = ("auto", "cuda", "unified", "pinned")
# No work of the step runs beside its reads: twice the blocks that keep the link busy.
_BLOCKS = 2 * DEFAULT_BLOCKS
# Tables that `auto` leaves room for: the rows, and two numbers that Adam keeps for each of theirs.
_TABLES = 3


class HotRows(NamedTuple):
    """Rows that lie in GPU memory too. `ids`: Ascending int64 `[H]` on the GPU."""

    ids: Tensor
    directory: Directory
    misses: float

    @classmethod
    def of(cls, ids: Tensor, num_rows: int, misses: float = 1.0) -> HotRows | None:
        """Make the directory of hot rows among `num_rows`; None if there are none."""
        return cls(ids, Directory.of(ids, num_rows).wait(), misses) if ids.numel() > 0 else None


class TrainedRows:
    """A table of rows `[N, D]`, and copies of the hot ones.

    Args:
        table: `[N, D]`, contiguous, as the device sees it that computes.
        block: Memory of the host that `table` lies in; None for ordinary memory and memory of the GPU.
        hot_rows: Rows to be copied; None for none.

    Attributes:
        placement: Memory of the table: `cuda`, `cpu`, `unified` or `pinned`.
        version: Number of the writes that torch has seen to `table`, when the hot copies were made.
    """

    def __init__(self, table: Tensor, block: Block | None = None, hot_rows: HotRows | None = None, *,
                 writes_through: bool = True) -> None:  # fmt: skip
        self.table, self.block, self.hot_rows = table, block, hot_rows
        self.placement = table.device.type if block is None else block.placement
        self._writes_through, self.version = writes_through, table._version
        self._max_blocks: int | None = None
        if block is not None and table.numel() > 0:
            row_bytes = table.shape[1] * table.element_size()
            misses = 1.0 if hot_rows is None else hot_rows.misses
            self._max_blocks = blocks_beside_hot(blocks_for_rows(_BLOCKS, row_bytes, row_bytes), misses)
        self.hot: Tensor | None = None
        if hot_rows is not None:
            try:
                self.hot = gather_rows(table, hot_rows.ids, max_blocks=self._max_blocks)
            except torch.OutOfMemoryError as error:
                raise MemoryLimitError(f"device_cache_size must leave GPU memory for {len(hot_rows.ids)} hot rows, and "
                                       f"as many of each number of an optimizer: {error}") from error  # fmt: skip

    @property
    def num_hot_rows(self) -> int:
        """Number of copies in GPU memory."""
        return 0 if self.hot is None else len(self.hot)

    def read(self, ids: Tensor, errors: Tensor | None = None) -> Tensor:
        """Return rows of ids, `[n, D]`.

        Args:
            ids: int32 or int64 `[n]`, on the device of the table. On a GPU, an id out of range gives a row of zeros.
            errors: On a GPU: int64 `[1]` that gets the lowest position of such an id; None reports none.
        """
        if self.block is not None:
            self.block.check_process()
        if self.hot is None or self.hot_rows is None:
            return gather_rows(self.table, ids, errors=errors, max_blocks=self._max_blocks)
        return gather_rows(self.hot, ids, cold=self.table, directory=self.hot_rows.directory, errors=errors,
                           max_blocks=self._max_blocks)  # fmt: skip

    def write(self, ids: Tensor, rows: Tensor) -> None:
        """Replace rows.

        Args:
            ids: int32 or int64 `[n]`, none of them twice, on the device of the table. On a GPU, ids out of range write
                no row.
            rows: `[n, D]` of the table's dtype, on that device.
        """
        if self.hot is None or self.hot_rows is None:
            _scatter(self.table, ids, rows)
            return
        places = locate_ids(ids, self.hot_rows.directory, len(self.table))
        _scatter(self.hot, places, rows)
        _scatter(self.table, ids if self._writes_through else torch.where(places < 0, ids, -1), rows)

    def refresh(self) -> None:
        """Copy hot rows anew if torch has written to the table, as an optimizer of torch or a checkpoint does."""
        if self.version == self.table._version:
            return
        self.version = self.table._version
        if self.hot_rows is not None:
            gather_rows(self.table, self.hot_rows.ids, out=self.hot, max_blocks=self._max_blocks)

    def note_written(self) -> None:
        """Show torch that `write` has changed the table."""
        increment_version(self.table)
        self.version = self.table._version

    def load(self, rows: Tensor) -> None:
        """Take the rows of a tensor, `[N, D]` of any dtype and on any device."""
        if rows.shape != self.table.shape:
            raise ArgumentError(f"rows must have shape {tuple(self.table.shape)}, got {tuple(rows.shape)}")
        with torch.no_grad():
            self.table.copy_(rows)
        self.refresh()

    def list_rows(self) -> Tensor:
        """Return all rows over the same memory, `[N, D]`; of the host after the GPU has finished."""
        if self.hot is not None and self.hot_rows is not None and not self._writes_through:
            _scatter(self.table, self.hot_rows.ids, self.hot)
        if self.block is None:
            return self.table
        if self.table.is_cuda:
            torch.cuda.synchronize(self.table.device)
        return self.block.view_on_cpu(self.table.dtype, self.table.shape)

    def make_like(self, value: float) -> TrainedRows:
        """Make rows of one number in memory of the same kind, with the same hot rows, for an optimizer."""
        table, block = allocate_rows(self.table.shape, self.table.dtype, self.placement, self.table.device)
        if block is None or value != 0:
            table.fill_(value)
        return TrainedRows(table, block, self.hot_rows, writes_through=False)


def _scatter(table: Tensor, ids: Tensor, rows: Tensor) -> None:
    """Write rows of ids; ids below 0 write none."""
    if not ids.is_cuda:
        is_row = ids >= 0
        if not bool(is_row.all()):
            ids, rows = ids[is_row], rows[is_row]
    scatter_rows(table, ids, rows, errors=unread_errors(ids.device), is_unique=True)


def allocate_rows(shape: torch.Size, dtype: torch.dtype, placement: str, device: torch.device
                  ) -> tuple[Tensor, Block | None]:  # fmt: skip
    """Allocate a table as `device` sees it, `[N, D]`, and the host memory behind it; zero only if there is some."""
    if placement in ("cpu", "cuda"):
        return torch.empty(shape, dtype=dtype, device=device), None
    block = allocate_or_fall_back(shape.numel() * dtype.itemsize, placement, device)
    if block.placement == "cpu":
        raise DeviceError(f"placement={placement!r} needs host memory that {device} reads, and none could be had: pass "
                          "device='cpu', and bring the rows of a batch to the GPU")  # fmt: skip
    # The CPU takes the pages, as for rows of a `Feature`: a GPU would fault on each.
    with show_wait("clearing rows on the host", items=shape.numel()):
        block.view_on_cpu(dtype, shape).zero_()
    return block.view_on_gpu(dtype, shape, device), block


def place_trained(shape: torch.Size, dtype: torch.dtype, placement: str, device: torch.device
                  ) -> tuple[Tensor, Block | None]:  # fmt: skip
    """Allocate the table of an embedding; `auto` takes GPU memory if it has room for Adam's numbers too."""
    if device.type == "cpu":
        return allocate_rows(shape, dtype, "cpu", device)
    if placement == "auto":
        assert device.index is not None
        fits = _TABLES * shape.numel() * dtype.itemsize <= budget_of(free_bytes(device.index))
        placement = "cuda" if fits else choose_host_memory(device.index)
    return allocate_rows(shape, dtype, placement, device)


def choose_hot_rows(table: Tensor, asked: int | str, hotness: str | Tensor, csr_topo: Listing | None
                    ) -> HotRows | None:  # fmt: skip
    """Choose the hot rows of a table on the host, `[N, D]` as the GPU sees it.

    Args:
        asked, hotness, csr_topo: The `device_cache_size`, `hotness` and `csr_topo` of an embedding.
    """
    num_bytes = table.numel() * table.element_size()
    budget = min(num_bytes, parse_size(asked, num_bytes))
    if budget == 0:
        return None
    budget = fit_budget(budget, asked, table.device)
    scores = score_rows(hotness, csr_topo, len(table))
    ids, misses = choose_hottest(scores, len(table), budget * len(table) // num_bytes)
    return HotRows.of(ids.to(table.device), len(table), misses)


_ROWS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def hold_rows(parameter: Tensor, rows: TrainedRows) -> None:
    """Let optimizers find the rows of a parameter, `[N, D]`, as long as it lives."""
    _ROWS[parameter] = rows


def find_rows(parameter: Tensor) -> TrainedRows:
    """Find the rows of a parameter, `[N, D]`; of another one than an embedding's, those in its own memory."""
    rows: TrainedRows | None = _ROWS.get(parameter)
    if rows is None or rows.table.data_ptr() != parameter.data_ptr():
        rows = TrainedRows(parameter.detach())
    return rows
