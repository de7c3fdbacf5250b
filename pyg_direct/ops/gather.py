"""Rows of tables by id, on the device of the ids (see `kernels/gather.py`)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError
from pyg_direct.kernels import gather as kernels
from pyg_direct.kernels.bitmap import WORD, rank_words_cpu, rank_words_gpu, sum_words_gpu
from pyg_direct.kernels.jit import SIMULATED, THREADS
from pyg_direct.kernels.state import NO_POSITION
from pyg_direct.ops.check import check_ids
from pyg_direct.ops.launch import cpu_chunks, full_grid, run_cpu, run_gpu, runs_on_gpu


class Directory(NamedTuple):
    """Which ids are hot, as a ranked bitmap.

    Attributes:
        bits: uint32 `[W]`, one bit an id.
        ranks: int32 `[W]`, number of hot ids before each word.
    """

    bits: Tensor
    ranks: Tensor

    @classmethod
    def of(cls, hot_ids: Tensor, num_rows: int) -> Directory:
        """Directory of the ids in `hot_ids` (any order, unique), on their device."""
        hot_ids = check_ids("hot_ids", hot_ids, num_rows).long()
        mask = torch.zeros(-(-max(num_rows, 1) // WORD) * WORD, dtype=torch.bool, device=hot_ids.device)
        mask[hot_ids] = True
        weights = (2 ** torch.arange(WORD, device=hot_ids.device)).long()
        bits = (mask.view(-1, WORD) * weights).sum(1).to(torch.uint32)
        ranks = torch.empty(bits.numel(), dtype=torch.int32, device=hot_ids.device)
        if runs_on_gpu(hot_ids):
            grid = full_grid(hot_ids)
            block_sums = torch.empty(grid, dtype=torch.int64, device=hot_ids.device)
            run_gpu(sum_words_gpu, grid, bits, block_sums)
            run_gpu(rank_words_gpu, grid, bits, block_sums, ranks)
        else:
            run_cpu(rank_words_cpu, bits, ranks, torch.empty(cpu_chunks(), dtype=torch.int64))
        return cls(bits, ranks)

    @classmethod
    def empty(cls, device: torch.device) -> Directory:
        """Directory of a single table."""
        return cls(torch.empty(0, dtype=torch.uint32, device=device), torch.empty(0, dtype=torch.int32, device=device))

    def to(self, device: torch.device) -> Directory:
        """The same on another device."""
        return Directory(self.bits.to(device), self.ranks.to(device))


def gather_rows(hot: Tensor, ids: Tensor, *, cold: Tensor | None = None, directory: Directory | None = None,
                out: Tensor | None = None, errors: Tensor | None = None, max_blocks: int | None = None,
                ) -> Tensor:  # fmt: skip
    """Rows `ids` of one table, or of hot rows over a table of all rows.

    Args:
        hot: The table `[N, ...]`, or the hot rows in ascending order of their ids; contiguous.
        ids: int32 or int64 `[n]`, on the device that does the work.
        cold: The table `[N, ...]` where `hot` holds a part of it, readable by that device.
        directory: Which ids are hot; needed with `cold`.
        out: Where to write, `[n, ...]` of the table's dtype, contiguous; made when None.
        errors: On a GPU: int64 `[1]` that gets the lowest position of an id out of range (its row is zero).
            Ids on the CPU are checked before anything is written.
        max_blocks: On a GPU: cap of the grid, for reads over the link beside other work.

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
    """
    num_rows = hot.shape[0] if cold is None else cold.shape[0]
    ids = check_ids("ids", ids, num_rows)
    if (cold is None) != (directory is None):
        raise ArgumentError(f"directory must say which ids are hot where cold is given, got {directory}")
    cold = hot[:0] if cold is None else cold
    directory = Directory.empty(ids.device) if directory is None else directory
    if not hot.is_contiguous() or not cold.is_contiguous():
        raise ArgumentError("hot and cold must be contiguous, got a strided tensor")
    if cold.dtype != hot.dtype or cold.shape[1:] != hot.shape[1:]:
        raise ArgumentError(
            f"cold must have the row {tuple(hot.shape[1:])} of {hot.dtype} of hot, got {tuple(cold.shape[1:])} of "
            f"{cold.dtype}"
        )
    shape = (ids.numel(), *hot.shape[1:])
    if out is None:
        out = torch.empty(shape, dtype=hot.dtype, device=ids.device)
    elif out.shape != shape or out.dtype != hot.dtype or not out.is_contiguous() or out.device != ids.device:
        raise ArgumentError(
            f"out must be contiguous {shape} of {hot.dtype} on {ids.device}, got {tuple(out.shape)} of {out.dtype} on "
            f"{out.device}"
        )
    if out.numel() == 0:
        return out
    if runs_on_gpu(ids):
        if errors is None:
            errors = torch.full((1,), NO_POSITION, dtype=torch.int64, device=ids.device)
        _gather_on_gpu(hot, cold, directory, ids, num_rows, out, errors, max_blocks)
    else:
        unit = _widest_unit(hot, cold, out, (torch.int64, torch.int32, torch.int16, torch.uint8))
        run_cpu(kernels.gather_rows_cpu, *(_rows_of(t, unit) for t in (hot, cold)), *directory, ids,
                _rows_of(out, unit))  # fmt: skip
    return out


def _row_bytes(tensor: Tensor) -> int:
    return tensor[:1].numel() * tensor.element_size() if tensor.shape[0] else tensor.element_size() * max(
        1, torch.Size(tensor.shape[1:]).numel())  # fmt: skip


def _widest_unit(hot: Tensor, cold: Tensor, out: Tensor, units: tuple[torch.dtype, ...]) -> torch.dtype:
    step = _row_bytes(out)
    addresses = hot.data_ptr() | cold.data_ptr() | out.data_ptr()
    return next(u for u in units if step % u.itemsize == 0 and addresses % u.itemsize == 0)


def _rows_of(tensor: Tensor, unit: torch.dtype) -> Tensor:
    width = _row_bytes(tensor) // unit.itemsize
    if tensor.numel() == 0:
        return torch.empty(0, width, dtype=unit, device=tensor.device)
    return _flat(tensor, unit).view(-1, width)


def _flat(tensor: Tensor, unit: torch.dtype) -> Tensor:
    flat = tensor.detach().view(torch.uint8) if tensor.dtype == torch.bool else tensor.detach()
    flat = flat.reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    return flat.view(torch.uint8).view(unit)


def _lane_bits(items: int) -> int:
    """Logarithm of the threads that share a row: for about four items each, at most a warp."""
    return min(min(32, THREADS).bit_length() - 1, max(0, (-(-items // 4) - 1).bit_length()))


def _gather_on_gpu(hot: Tensor, cold: Tensor, directory: Directory, ids: Tensor, num_rows: int, out: Tensor,
                   errors: Tensor, max_blocks: int | None) -> None:  # fmt: skip
    row_bytes = _row_bytes(out)
    addresses = hot.data_ptr() | cold.data_ptr() | out.data_ptr()
    wide = row_bytes % 16 == 0 and addresses % 16 == 0 and not SIMULATED
    unit = torch.int64 if wide else _widest_unit(hot, cold, out, (torch.int64, torch.uint32, torch.uint8))
    width = row_bytes // (16 if wide else unit.itemsize)
    lane_bits = _lane_bits(width)
    # As many threads as there are lanes of rows, each done after its row: faster than fewer that loop.
    grid = -(-(ids.numel() << lane_bits) // THREADS)
    grid = min(grid, (3 if SIMULATED else 2**31 - 1) if max_blocks is None else max_blocks)
    if wide:
        run_gpu(kernels.gather_wide_rows_gpu, grid, hot.data_ptr(), cold.data_ptr(), *directory, ids, num_rows, width,
                lane_bits, _flat(out, unit), errors)  # fmt: skip
    else:
        run_gpu(kernels.gather_rows_gpu, grid, _flat(hot, unit), _flat(cold, unit), *directory, ids, num_rows, width,
                lane_bits, _flat(out, unit), errors)  # fmt: skip
