"""Contract of every place that rows live in: rows by number, read into given memory."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, IdError
from pyg_direct.features.tier_report import TierReport
from pyg_direct.kernels.batch_counters import NO_POSITION
from pyg_direct.kernels.rows.gather import PIECE
from pyg_direct.ops.argument_checks import check_ids
from pyg_direct.ops.rows.gather_rows import Gather, choose_gather, gather_rows, scatter_rows
from pyg_direct.runtime.cuda.memory import Block
from pyg_direct.runtime.host.host_memory import use_large_pages

# Page-locked words in which kernels report bad ids. They are kept for the next reader: a kernel of the last one may
# still run, and must not write into reused memory.
_WORDS: list[Tensor] = []


class ReadErrors:
    """Word in which kernels report ids out of range: a read that is only enqueued cannot raise them.

    Args:
        is_pinned: True if kernels of a GPU write the word.

    Attributes:
        word: The lowest position of an id out of range, int64 `[1]` on the host.
        position: The same number, as Python reads it fastest.
    """

    def __init__(self, is_pinned: bool) -> None:
        self.word = _WORDS.pop() if is_pinned and _WORDS else torch.empty(
            1, dtype=torch.int64, pin_memory=is_pinned, device="cpu")  # fmt: skip
        self.position = ctypes.c_int64.from_address(self.word.data_ptr())
        self.position.value = NO_POSITION
        self._is_pinned = is_pinned

    def raise_first(self, name: str, num_rows: int) -> None:
        """Raise an `IdError` for an id reported since the last call; `name` is the argument with the ids."""
        position = self.position.value
        if position != NO_POSITION:
            self.position.value = NO_POSITION
            raise IdError(f"{name} must lie in [0, {num_rows}); an earlier read had an id outside at position "
                          f"{position}")  # fmt: skip

    def __del__(self, words: list[Tensor] = _WORDS) -> None:
        # Names are passed in: at interpreter exit, names of modules are gone before objects are.
        if getattr(self, "_is_pinned", False):
            words.append(self.word)


class HeldRows(Protocol):
    """Rows in memory beside those that a tier reads, by their positions there."""

    @property
    def is_on_gpu(self) -> bool:
        """True if kernels of a GPU read them, for which a position of -1 is no error."""

    def gather(self, ids: Tensor, errors: Tensor | None) -> Tensor:
        """Read rows of positions; on a GPU a position of -1 may give any row."""

    def read(self, ids: Tensor) -> Tensor:
        """Read rows of positions that are all valid."""


class Tier(ABC):
    """Rows of one place. A tier numbers its own rows from 0; the feature maps ids to these numbers.

    Attributes:
        placement: Memory of the rows: `cuda`, `peer`, `unified`, `pinned`, `cpu`, `mmap` or `sharded`.
        shape: `[M, ...]`.
        dtype: Of the rows as they are stored, and as they are read.
        refusal: Why its rows are not updated.
        is_gpu_memory: True if the rows lie in memory of GPUs.
        is_collective: True if all processes of a group take part in each read, including processes that read no rows.
    """

    title = "memory"
    refusal = "they are read-only"
    is_gpu_memory = is_collective = False

    def __init__(self, placement: str, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self.placement, self.shape, self.dtype, self.device = placement, shape, dtype, device

    def read(self, ids: Tensor, out: Tensor) -> None:
        """Write row `ids[i]` to `out[i]`; on a GPU this is enqueued on the current stream if the tier supports that.

        Args:
            ids: int32 or int64 `[n]` on `device`, in any order; ascending ones are read fastest.
            out: `[n, ...]` of `dtype` on `device`, contiguous; all of it is written.

        Raises:
            IdError: an id on the CPU is outside [0, M); no row was written. An id on a GPU gives a row of zeros, and
                this error at the next read or `synchronize()`.
        """
        self.raise_earlier_error()
        ids = check_ids("ids", ids, self.shape[0])
        shape = (ids.numel(), *self.shape[1:])
        if ids.device != self.device:
            raise ArgumentError(f"ids must be on {self.device}, got ids on {ids.device}")
        if out.shape != shape or out.dtype != self.dtype or out.device != self.device or not out.is_contiguous():
            raise ArgumentError(f"out must be contiguous {shape} of {self.dtype} on {self.device}, got "
                                f"{tuple(out.shape)} of {out.dtype} on {out.device}")  # fmt: skip
        if out.numel() > 0 or self.is_collective:
            self._read(ids, out)

    def take(self, ids: Tensor) -> Tensor:
        """Return rows of ids in a tensor of their own, `[n, ...]` of `dtype`; otherwise as `read`."""
        rows = self._make_rows(ids.numel())
        self.read(ids, rows)
        return rows

    def take_beside(self, ids: Tensor, locate: Callable[[Tensor], Tensor], held: HeldRows) -> tuple[Tensor, int]:
        """Return (rows of ids as in `take`, the number of rows that came from this tier); the others come from memory.

        Args:
            locate: Maps ids `[n]` to positions in memory, int64 `[n]`; -1 for rows that only the tier has, and for bad
                ids.
        """
        places = locate(ids)
        missing = (places < 0).nonzero().view(-1)
        if missing.numel() == ids.numel():
            return self.take(ids), missing.numel()
        # While rows come from the tier, a GPU reads those in memory.
        if held.is_on_gpu:
            rows = held.gather(places, None)
        else:
            hits = (places >= 0).nonzero().view(-1)
            rows = self._make_rows(places.numel())
            scatter_rows(rows, hits, held.gather(places[hits], None), is_unique=True)
        if missing.numel() > 0:
            self.place(ids[missing], rows, missing)
        return rows, missing.numel()

    def place(self, ids: Tensor, out: Tensor, positions: Tensor) -> None:
        """Write row `ids[i]` to `out[positions[i]]`, no position twice; otherwise as `read`.

        Args:
            out: `[m, ...]`, otherwise as in `read`.
            positions: int64 `[n]` in [0, m), on `device`.
        """
        rows = out.new_empty((ids.numel(), *self.shape[1:]))
        self.read(ids, rows)
        scatter_rows(out, positions, rows, is_unique=True)

    def write(self, ids: Tensor, rows: Tensor) -> None:
        """Replace row `ids[i]` by `rows[i]`; of an id that comes several times, the last one."""
        raise ArgumentError(f"rows of a tier in {self.placement!r} cannot be written: they are read-only")

    @property
    def table(self) -> Tensor | None:
        """Return the rows `[M, ...]` as kernels on `device` read them in place; None if only `read` reaches them."""
        return None

    def synchronize(self) -> None:
        """Wait for all reads so far, and raise their errors."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.raise_earlier_error()

    def raise_earlier_error(self) -> None:  # noqa: B027 (a tier that enqueues nothing has nothing to say)
        """Raise the error of an earlier read that was only enqueued."""

    def check_sending(self) -> None:  # noqa: B027 (most rows can be)
        """Raise an `ArgumentError` if the rows cannot be sent to other processes."""

    def count_served(self, on: bool) -> None:  # noqa: B027 (most tiers have one line in a report)
        """Count from zero the reads that `describe` lists separately, or stop."""

    def describe(self, num_rows: int, num_read: int | None, link: str | None) -> list[TierReport]:
        """Return lines of a report on rows that nearer tiers do not serve: their number, and how many were read. None
        stands for reads that are not counted; `link` connects the GPU to rows of the host.
        """
        return [TierReport(self.title, num_rows, num_read, None if self.is_gpu_memory else link)]

    def _make_rows(self, count: int) -> Tensor:
        return use_large_pages(torch.empty((count, *self.shape[1:]), dtype=self.dtype, device=self.device))

    @abstractmethod
    def _read(self, ids: Tensor, out: Tensor) -> None:
        """Read as `read` does, with checked arguments and at least one id."""


class TableTier(Tier):
    """Rows that kernels of `device` read in place: in its memory, in a peer's, or in host memory that it sees.

    Args:
        table: `[M, ...]`, contiguous, on `device` as torch sees it.
        placement: Memory of its bytes; see `Tier`.
        block: Owner of the bytes, if the package owns them.
        max_blocks: Cap of the grid, for reads over a link; None for none.
    """

    def __init__(self, table: Tensor, placement: str, *, block: Block | None = None,
                 max_blocks: int | None = None) -> None:  # fmt: skip
        if not table.is_contiguous():
            raise ArgumentError(f"table must be contiguous, got strides {table.stride()}")
        super().__init__(placement, table.shape, table.dtype, table.device)
        self.block, self._table, self._max_blocks = block, table, max_blocks
        self._errors = ReadErrors(table.is_cuda)
        self._position = self._errors.position
        self._gather: Gather | None = None
        self._is_on_cpu = not table.is_cuda
        self._row, self._is_empty = tuple(table.shape[1:]), 0 in table.shape[1:]

    @property
    def table(self) -> Tensor:
        """The rows, `[M, ...]`."""
        if self.block is not None:
            self.block.check_process()
        return self._table

    def take(self, ids: Tensor) -> Tensor:
        """Read rows of ids on a GPU that were checked, as the process was, into a new tensor; otherwise as `read`."""
        if self._is_on_cpu:
            return super().take(ids)
        if self._position.value != NO_POSITION:
            self.raise_earlier_error()
        count = ids.numel()
        # Sizes one by one are parsed faster than a tuple of them.
        out = self._table.new_empty(count, *self._row)
        if count == 0 or self._is_empty:
            return out
        # Torch allocates aligned memory.
        (self._gather or self._choose_gather())(ids if ids.is_contiguous() else ids.contiguous(), out)
        return out

    def _read(self, ids: Tensor, out: Tensor) -> None:
        if not ids.is_cuda or out.data_ptr() % PIECE:
            gather_rows(self.table, ids, out=out, errors=self._errors.word, max_blocks=self._max_blocks)
            return
        if self.block is not None:
            self.block.check_process()
        (self._gather or self._choose_gather())(ids, out)

    def _choose_gather(self) -> Gather:
        self._gather = choose_gather(self._table, None, None, self.dtype, None, self._errors.word, self._max_blocks)
        return self._gather

    def write(self, ids: Tensor, rows: Tensor) -> None:
        """Replace row `ids[i]` by `rows[i]`; on a GPU enqueued on the current stream.

        Raises:
            ArgumentError, ArgumentTypeError, IdError: as `read`.
        """
        if rows.device != self.device:
            raise ArgumentError(f"rows must be on {self.device}, got rows on {rows.device}")
        scatter_rows(self.table, ids, rows, errors=self._errors.word)

    def raise_earlier_error(self) -> None:
        """Raise the error of an earlier read on a GPU."""
        self._errors.raise_first("ids", self.shape[0])
