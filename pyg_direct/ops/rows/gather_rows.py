"""Gather of table rows by id, on the device of the ids, and rows written by id (see `kernels/rows/gather.py`).

`RowReader` reads rows of one table for batch after batch. It computes once the values that `gather_rows` computes at
each call. `NarrowReader` reads several tables of short rows by one list of ids. `TypedReader` reads a table of each
type by its own ids.

`blocks_for_rows` and `blocks_beside_hot` count blocks of a grid that keep the link to host memory busy: more would
only displace a model's. A block has 1,024 threads, as many as take a whole multiprocessor (`kernels/rows/gather.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from operator import sub
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_direct.compiler.jit import SIMULATED, THREADS
from pyg_direct.errors import ArgumentError, IdError
from pyg_direct.kernels.batch_counters import NO_POSITION
from pyg_direct.kernels.local_ids.bitmap import WORD, rank_words_cpu, rank_words_gpu, sum_words_gpu
from pyg_direct.kernels.rows import gather as kernels
from pyg_direct.kernels.rows.gather import PIECE
from pyg_direct.ops.argument_checks import check_ids
from pyg_direct.ops.run_kernel import (
    cpu_chunks,
    full_grid,
    grid_for,
    prepare_gpu,
    run_cpu,
    run_gpu,
    runs_on_gpu,
    threads_for,
)
from pyg_direct.runtime.cuda.launch import OPEN
from pyg_direct.runtime.host.host_memory import use_large_pages
from pyg_direct.runtime.host.tensor_views import as_bytes

# Dtypes whose rows can be read as float32.
STORED = {torch.float16: kernels.HALF, torch.bfloat16: kernels.BFLOAT, torch.float8_e4m3fn: kernels.FLOAT8}
# Dtype in which stored numbers are viewed, by their bytes.
_UNIT = {1: torch.uint8, 2: torch.int16}
# A piece of the output meets at most two rows, or three of bytes: shorter rows are read item by item.
_SHORTEST_ROW = {kernels.ALIGNED: 16, kernels.WORDS: 16, kernels.BYTES: 8}
_SHORTEST_WIDE_ROW = 12
# Rows up to which a torch copy on a CPU is faster than waking Numba's threads; with more, torch would wake its own.
FEW_BYTES = 1 << 16
# Bytes that a CPU gathers in the time of one item of `threads_for`.
LIGHT = 32


Gather = Callable[[Tensor, Tensor], None]


class Directory(NamedTuple):
    """Hot ids as a ranked bitmap.

    Attributes:
        bits: uint32 `[W]`, one bit an id.
        ranks: int32 `[W]`, number of hot ids before each word.
    """

    bits: Tensor
    ranks: Tensor

    @classmethod
    def of(cls, hot_ids: Tensor, num_rows: int) -> Directory:
        """Make the directory of the ids in `hot_ids` (any order, unique), on their device."""
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
            run_cpu(rank_words_cpu, bits, ranks, torch.empty(cpu_chunks(), dtype=torch.int64, device="cpu"))
        return cls(bits, ranks)

    def wait(self) -> Directory:
        """Wait until the directory is complete, for reads on any stream: an early read would give wrong positions."""
        if self.bits.is_cuda:
            torch.cuda.current_stream(self.bits.device).synchronize()
        return self

    @classmethod
    @functools.cache
    def empty(cls, device: torch.device) -> Directory:
        """Return the directory of a single table."""
        return cls(torch.empty(0, dtype=torch.uint32, device=device), torch.empty(0, dtype=torch.int32, device=device))

    def to(self, device: torch.device) -> Directory:
        """Copy it to another device."""
        return Directory(self.bits.to(device), self.ranks.to(device))


def gather_rows(hot: Tensor, ids: Tensor, *, cold: Tensor | None = None, directory: Directory | None = None,
                dtype: torch.dtype | None = None, exponents: Tensor | None = None, out: Tensor | None = None,
                errors: Tensor | None = None, max_blocks: int | None = None) -> Tensor:  # fmt: skip
    """Gather rows `ids` of one table, or of hot rows over a table of all rows.

    Args:
        hot: The table `[N, ...]`, or the hot rows in ascending order of their ids; contiguous.
        ids: int32 or int64 `[n]`, on the device that does the work.
        cold: The table `[N, ...]` if `hot` holds a part of it, readable by that device.
        dtype: float32 to widen rows stored as float16, bfloat16 or float8_e4m3fn; None for the table's own.
        exponents: uint8 `[N]` on the same device, needed to widen float8_e4m3fn: row `i` is to be multiplied by
            `2 ** (exponents[i] - 127)`.
        out: Output, `[n, ...]` of the result's dtype, contiguous; allocated if None.
        errors: On a GPU: int64 `[1]` that gets the lowest position of an id out of range (its row is zero).
            Ids on the CPU are checked before anything is written.
        max_blocks: On a GPU: cap of the grid, for reads over the link beside other work.
    """
    is_single, num_rows = cold is None, (hot if cold is None else cold).shape[0]
    ids = check_ids("ids", ids, num_rows)
    if (cold is None) != (directory is None):
        raise ArgumentError(f"directory must say which ids are hot where cold is given, got {directory}")
    stored_dtype, row = hot.dtype, hot.shape[1:]
    if directory is None or cold is None:
        # A second table is not read.
        cold, directory = hot, Directory.empty(ids.device)
    elif cold.dtype != stored_dtype or cold.shape[1:] != row:
        raise ArgumentError(
            f"cold must have the row {tuple(row)} of {stored_dtype} of hot, got {tuple(cold.shape[1:])} of {cold.dtype}"
        )
    if not hot.is_contiguous() or not cold.is_contiguous():
        raise ArgumentError("hot and cold must be contiguous, got a strided tensor")
    dtype = stored_dtype if dtype is None else dtype
    exponents = check_widening(stored_dtype, dtype, exponents, num_rows, ids.device)
    shape = (ids.numel(), *row)
    if out is None:
        out = use_large_pages(torch.empty(shape, dtype=dtype, device=ids.device))
    elif out.shape != shape or out.dtype != dtype or not out.is_contiguous() or out.device != ids.device:
        raise ArgumentError(
            f"out must be contiguous {shape} of {dtype} on {ids.device}, got {tuple(out.shape)} of {out.dtype} on "
            f"{out.device}"
        )
    if out.numel() == 0:
        return out
    if runs_on_gpu(ids):
        if errors is None:
            errors = unread_errors(ids.device)
        choose_gather(hot, cold, directory, dtype, exponents, errors, max_blocks, out.data_ptr())(ids, out)
    elif dtype != stored_dtype:
        unit = _UNIT[hot.dtype.itemsize]
        run_cpu(kernels.widen_rows_cpu, *(rows_in_units(t, unit) for t in (hot, cold)), *directory, ids,
                STORED[hot.dtype], exponents, rows_in_units(out, torch.uint32))  # fmt: skip
    else:
        unit = widest_unit(hot, cold, out, (torch.int64, torch.int32, torch.int16, torch.uint8))
        if is_single and out.numel() * out.element_size() <= FEW_BYTES:
            torch.index_select(rows_in_units(hot, unit), 0, ids, out=rows_in_units(out, unit))
            return out
        with threads_for(out.numel() * out.element_size() // LIGHT):
            run_cpu(kernels.gather_rows_cpu, *(rows_in_units(t, unit) for t in (hot, cold)), *directory, ids,
                    rows_in_units(out, unit))  # fmt: skip
    return out


def prepare_read(table: Tensor, ids: Tensor, out: Tensor, positions: Tensor | None = None
                 ) -> Callable[[int, int], None]:  # fmt: skip
    """Return a loop that reads rows `ids[begin:end]` of a table into CPU memory. It does not check ids, and any thread
    may run it. So threads that share a read inspect its tensors once.

    Args:
        out: Output, `[n, ...]`; of any length with `positions`.
        positions: Row `ids[i]` goes to `out[positions[i]]`, int64 `[n]`; None for `out[i]`.
    """
    units = (torch.int64, torch.int32, torch.int16, torch.uint8) if positions is None else (torch.int32, torch.uint8)
    unit = widest_unit(table, table, out, units)
    rows, target, numbers = rows_in_units(table, unit).numpy(), rows_in_units(out, unit).numpy(), ids.numpy()
    bits, ranks = (part.numpy() for part in Directory.empty(ids.device))
    places = None if positions is None else positions.numpy()

    def read(begin: int, end: int) -> None:
        if places is None:
            kernels.gather_rows_cpu(rows, rows, bits, ranks, numbers[begin:end], target[begin:end])
        else:
            kernels.place_rows_cpu(rows, numbers[begin:end], places[begin:end], target)

    return read


def check_widening(stored_dtype: torch.dtype, dtype: torch.dtype, exponents: Tensor | None, num_rows: int,
                    device: torch.device) -> Tensor:  # fmt: skip
    """Check a widening, and return the exponents of the rows, empty if there are none."""
    if dtype == stored_dtype:
        return _no_exponents(device)
    if dtype != torch.float32 or stored_dtype not in STORED:
        raise ArgumentError(
            f"dtype must be float32 over rows of {_names(STORED)}, or {stored_dtype} as hot, got {dtype}"
        )
    if stored_dtype != torch.float8_e4m3fn:
        return _no_exponents(device)
    if (exponents is None or exponents.shape != (num_rows,) or exponents.dtype != torch.uint8
            or exponents.device != device or not exponents.is_contiguous()):  # fmt: skip
        got = "None" if exponents is None else f"{tuple(exponents.shape)} of {exponents.dtype} on {exponents.device}"
        raise ArgumentError(f"exponents must be contiguous ({num_rows},) of torch.uint8 on {device}, got {got}")
    return exponents


@functools.cache
def _no_exponents(device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device)


# Word for bad ids that no caller reads. Filling a new one would take another kernel.
_UNREAD: dict[torch.device, Tensor] = {}


def unread_errors(device: torch.device) -> Tensor:
    """Return the word for bad ids that no caller reads."""
    errors = _UNREAD.get(device)
    if errors is None:
        errors = torch.full((1,), NO_POSITION, dtype=torch.int64, device=device)
        # Memory that is allocated during a capture belongs to that graph.
        if device.type == "cpu" or not torch.cuda.is_current_stream_capturing():
            _UNREAD[device] = errors
    return errors


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _row_bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape[1:]) * tensor.element_size()


def widest_unit(hot: Tensor, cold: Tensor, out: Tensor, units: tuple[torch.dtype, ...]) -> torch.dtype:
    """Return the first of `units` that divides the rows of all three tables and fits their alignment."""
    alignment = _row_bytes(out) | hot.data_ptr() | cold.data_ptr() | out.data_ptr()
    return next(u for u in units if alignment % u.itemsize == 0)


def rows_in_units(tensor: Tensor, unit: torch.dtype) -> Tensor:
    """View the same rows as `[N, units]`, whatever their shape and dtype."""
    width = _row_bytes(tensor) // unit.itemsize
    if tensor.numel() == 0:
        return torch.empty(0, width, dtype=unit, device=tensor.device)
    return _flat(tensor, unit).view(-1, width)


def _flat(tensor: Tensor, unit: torch.dtype) -> Tensor:
    return as_bytes(tensor.detach().contiguous()).view(unit)


def choose_gather(hot: Tensor, cold: Tensor | None, directory: Directory | None, dtype: torch.dtype,
                  exponents: Tensor | None, errors: Tensor, max_blocks: int | None, address: int = 0,
                  strands: int = 1) -> Gather:  # fmt: skip
    """Return the read of rows of these tables on a GPU as (ids, out) -> None, with everything that depends on the
    tables computed.

    It chooses the shape of the grid: items for short rows, whole stores for GPU memory, whole reads for the link. Ids
    are not checked, and the tables must not move. `address` is the address of the output; 0 stands for any that torch
    allocates. `strands`: positions of a list of ids that are read at once, if all rows lie in GPU memory.
    """
    if directory is None or cold is None:
        cold, directory = hot, Directory.empty(hot.device)
    exponents = _no_exponents(hot.device) if exponents is None else exponents
    num_rows, stored_dtype = cold.shape[0], hot.dtype
    source_bytes, row_bytes = _row_bytes(hot), math.prod(hot.shape[1:]) * dtype.itemsize
    hot_address, cold_address = hot.data_ptr(), cold.data_ptr()
    alignment = hot_address | cold_address
    if dtype != stored_dtype:
        kind, is_short = STORED[stored_dtype], row_bytes < _SHORTEST_WIDE_ROW
        is_odd = bool(row_bytes % kernels.PIECE or alignment % (4 * stored_dtype.itemsize))
    else:
        alignment |= row_bytes | address
        kind = kernels.BYTES if alignment % 4 else kernels.WORDS if alignment % 16 else kernels.ALIGNED
        is_short = row_bytes < _SHORTEST_ROW[kind]
        is_odd = kind == kernels.BYTES
    most_blocks = (3 if SIMULATED else 2**31 - 1) if max_blocks is None else max_blocks
    if SIMULATED or is_short:
        return _choose_items(hot, cold, directory, dtype, num_rows, exponents, errors, most_blocks, address)
    tables = hot, cold
    # A grid with a cap reads over the link, as one of two tables mostly does.
    if max_blocks is not None or directory.bits.numel() > 0 or address % kernels.PIECE != 0:
        lane_bits = group_bits(row_bytes)
        args = (hot_address, cold_address, *directory, OPEN, num_rows, source_bytes, row_bytes, lane_bits, kind,
                exponents, OPEN, errors)  # fmt: skip
        launch = launch_long = prepare_gpu(kernels.gather_groups_gpu, *args)
        if 1 << lane_bits >= kernels.ROWS and kind != kernels.BYTES:
            launch_long = prepare_gpu(kernels.gather_listed_gpu, *args)
        lanes, share = 1 << lane_bits, kernels.ROWS * kernels.WIDE

        def read_groups(ids: Tensor, out: Tensor, keep: tuple[Tensor, Tensor] = tables) -> None:
            grid = -(-ids.numel() * lanes // share)
            if grid <= most_blocks:
                # All rows are requested at once.
                launch(grid, (ids, out.data_ptr()))
            else:
                launch_long(most_blocks, (ids, out.data_ptr()))

        return read_groups
    kernel, pieces = (kernels.gather_odd_pieces_gpu, 1) if is_odd else (kernels.gather_pieces_gpu, 2)
    order = () if is_odd else (strands,)
    launch = prepare_gpu(kernel, hot_address, OPEN, num_rows, source_bytes, row_bytes, kind, *order, exponents, OPEN,
                         errors)  # fmt: skip
    share = pieces * kernels.PIECE * THREADS

    def read_pieces(ids: Tensor, out: Tensor, keep: tuple[Tensor, Tensor] = tables) -> None:
        launch(-(-ids.numel() * row_bytes // share), (ids, out.data_ptr()))

    return read_pieces


def group_bits(row_bytes: int) -> int:
    """Return the logarithm of the threads that read a row over the link: one for each piece, at most a warp."""
    return min(5, (-(-row_bytes // kernels.PIECE) - 1).bit_length())


def _choose_items(hot: Tensor, cold: Tensor, directory: Directory, dtype: torch.dtype, num_rows: int,
                  exponents: Tensor, errors: Tensor, most_blocks: int, address: int) -> Gather:  # fmt: skip
    row_bytes = math.prod(hot.shape[1:]) * dtype.itemsize
    if dtype == hot.dtype:
        alignment = row_bytes | hot.data_ptr() | cold.data_ptr() | address
        unit = target_unit = next(u for u in (torch.uint32, torch.int16, torch.uint8) if alignment % u.itemsize == 0)
        widening: tuple[int | Tensor, ...] = ()
        kernel = kernels.gather_items_gpu
    else:
        unit, target_unit = _UNIT[hot.dtype.itemsize], torch.uint32
        widening = STORED[hot.dtype], exponents
        kernel = kernels.widen_items_gpu
    width, tables = row_bytes // target_unit.itemsize, (_flat(hot, unit), _flat(cold, unit))
    launch = prepare_gpu(kernel, *tables, *directory, OPEN, num_rows, width, *widening, OPEN, errors)

    def read_items(ids: Tensor, out: Tensor) -> None:
        target = out.view(target_unit) if dtype.itemsize == target_unit.itemsize else _flat(out, target_unit)
        launch(min(most_blocks, -(-ids.numel() * width // THREADS)), (ids, target.view(-1)))

    return read_items


def select_rows(table: Tensor, ids: Tensor) -> Tensor | None:
    """Select few rows `[n, ...]` of a contiguous table, both on the CPU, in one torch call.

    Return None if `gather_rows` must read them: they are many, an id is out of range, or torch does not support the
    dtype.
    """
    if ids.numel() * table.stride(0) * table.element_size() > FEW_BYTES:
        return None
    try:
        return table.index_select(0, ids)
    except (IndexError, RuntimeError):
        return None


class RowReader:
    """Reader of `gather_rows` on a GPU for ids that only the kernel checks.

    Args:
        hot, cold, directory, dtype, exponents: As in `gather_rows`; the tables must not move.
        errors: int64 `[1]` that gets the lowest position of an id out of range.
        max_blocks: Cap of the grid; None for none.
    """

    def __init__(self, hot: Tensor, cold: Tensor | None, directory: Directory | None, errors: Tensor,
                 max_blocks: int | None, *, dtype: torch.dtype | None = None,
                 exponents: Tensor | None = None, strands: int = 1) -> None:  # fmt: skip
        dtype = hot.dtype if dtype is None else dtype
        # `torch.empty_like` takes half the time of a call with dtype and device.
        self._row, self._like = tuple(hot.shape[1:]), torch.empty(0, dtype=dtype, device=hot.device)
        num_rows = hot.shape[0] if cold is None else cold.shape[0]
        exponents = check_widening(hot.dtype, dtype, exponents, num_rows, hot.device)
        self._gather = choose_gather(hot, cold, directory, dtype, exponents, errors, max_blocks, strands=strands)

    def read(self, ids: Tensor) -> Tensor:
        """Read rows `[n, ...]` of `ids`, int64 `[n]`, contiguous and on the GPU."""
        out = self._like.new_empty((ids.shape[0], *self._row))
        if out.numel() > 0:
            self._gather(ids, out)
        return out


MOST_TABLES = kernels.MOST_TABLES
_ROW_BYTES = (1, 2, 4, 8, 16)


def is_narrow(table: Tensor) -> bool:
    """Report whether a table may be read with others: contiguous aligned rows of 1, 2, 4, 8 or 16 bytes."""
    row_bytes = math.prod(table.shape[1:]) * table.element_size()
    return row_bytes in _ROW_BYTES and table.is_contiguous() and table.data_ptr() % row_bytes == 0


class NarrowReader:
    """Reader of several tables at once, equal to `gather_rows` of each.

    Args:
        tables: Two to `MOST_TABLES` tables `[N, ...]` of one N and device, for which `is_narrow` holds. They must not
            move.
        errors: int64 `[1]` that gets the lowest position of an id out of range, whose rows are zeros.
    """

    def __init__(self, tables: Sequence[Tensor], errors: Tensor) -> None:
        assert 2 <= len(tables) <= MOST_TABLES, f"{len(tables)} tables"
        assert all(is_narrow(table) and len(table) == len(tables[0]) for table in tables)
        self._tables, self._errors, self._num_rows = tables, errors, len(tables[0])
        rest = [0] * (MOST_TABLES - len(tables))
        row_bytes = [math.prod(table.shape[1:]) * table.element_size() for table in tables]
        self._addresses = [table.data_ptr() for table in tables] + rest
        self._bits = [_ROW_BYTES.index(size) for size in row_bytes] + rest
        # Integers and bools share one block of memory, because freeing each block takes the host longer than a launch.
        # The widest come first, so that all are aligned. Numbers that could take part in a gradient, and rows of
        # several items, have their own memory.
        order = sorted(range(len(tables)), key=lambda place: -row_bytes[place])
        whole = [p for p in order if tables[p].dim() == 1 and not (tables[p].is_floating_point() or
                                                                   tables[p].is_complex())]  # fmt: skip
        whole = [] if len(whole) == 1 else whole
        # (position, table, its row)
        self._alone = [(p, tables[p], tuple(tables[p].shape[1:])) for p in order if p not in whole]
        self._words = torch.empty(0, dtype=torch.int64, device=tables[0].device)
        self._whole_bytes = sum(row_bytes[p] for p in whole)
        # (dtype, its bytes, positions of the tables), widest first
        self._whole = [(dtype, dtype.itemsize, [p for p in whole if tables[p].dtype == dtype])
                       for dtype in dict.fromkeys(tables[p].dtype for p in whole)]  # fmt: skip

    def read(self, ids: Tensor, memory: list[Tensor] | None = None) -> list[Tensor]:
        """Read rows of `ids`, int32 or int64 `[n]`, contiguous and on the device of the tables: `[n, ...]` of each
        table.

        On a GPU the rows of integers and bools share a block of memory.

        Args:
            memory: Receives the tensors that own the memory of all rows.
        """
        own: list[Tensor] = [] if memory is None else memory
        if SIMULATED or not ids.is_cuda:
            rows = [gather_rows(table, ids, errors=self._errors) for table in self._tables]
            own += rows
            return rows
        count, out, outputs = ids.shape[0], list(self._tables), [0] * MOST_TABLES
        for place, table, row in self._alone:
            out[place] = table.new_empty((count, *row))
            outputs[place] = out[place].data_ptr()
            own.append(out[place])
        if self._whole:
            rest = self._words.new_empty((count * self._whole_bytes + 7) // 8)
            own.append(rest)
            address = rest.data_ptr()
            for dtype, item_bytes, places in self._whole:
                items = rest if dtype is torch.int64 else rest.view(dtype)
                sizes = [count] * len(places)
                *parts, rest = items.unsafe_split_with_sizes([*sizes, items.shape[0] - count * len(places)])
                for place, part in zip(places, parts, strict=True):
                    out[place], outputs[place] = part, address
                    address += count * item_bytes
        if count > 0:
            run_gpu(kernels.gather_narrow_gpu, -(-count // THREADS), ids, self._num_rows, *self._addresses, *outputs,
                    *self._bits, self._errors)  # fmt: skip
        return out


def fits_typed(table: Tensor) -> bool:
    """Report whether a table may be read with other types' tables: contiguous aligned rows, also of n * 16 bytes."""
    row_bytes = math.prod(table.shape[1:]) * table.element_size()
    is_wide = 0 < row_bytes < 2**31 and row_bytes % PIECE == 0 and table.data_ptr() % PIECE == 0
    return is_narrow(table) or (is_wide and table.is_contiguous())


def list_layout(begins: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Return the words that `TypedReader.read` needs on the device, `2 * T + 1`.

    Args:
        begins: First position of each table's ids in the list for `read`, `T`.
        counts: Their number, `T`.
    """
    starts = [*accumulate(counts, initial=0)]
    return [*starts, *map(sub, begins, starts)]


class TypedReader:
    """Reader of several tables, each by its own ids, equal to `gather_rows` of each.

    Args:
        tables: Tables `[N_t, ...]` of one dtype and row on one device, for which `fits_typed` holds; they must not
            move.
        errors: On a GPU: int64 `[1]` that gets the lowest position in the output whose id was out of range; its row is
            zeros. A CPU raises at once.
    """

    def __init__(self, tables: Sequence[Tensor], errors: Tensor | None) -> None:
        first = tables[0]
        assert all(fits_typed(t) and (t.dtype, t.shape[1:]) == (first.dtype, first.shape[1:]) for t in tables)
        self._tables = list(tables)
        # `new_empty` takes half the time of a call with dtype and device.
        self._row, self._like = tuple(first.shape[1:]), torch.empty(0, dtype=first.dtype, device=first.device)
        self._row_bytes = math.prod(self._row) * first.element_size()
        self._num_rows = [len(table) for table in tables]
        self._where = torch.from_numpy(self._find_tables()).to(first.device)
        kernel, size, self._share = kernels.gather_typed_gpu, self._row_bytes, (self._row_bytes, 2 * PIECE * THREADS)
        if self._row_bytes % PIECE:
            kernel, size, self._share = kernels.gather_typed_narrow_gpu, self._row_bytes.bit_length() - 1, (1, THREADS)
        self._launch = prepare_gpu(kernel, OPEN, self._where, OPEN, size, OPEN, errors)

    def _find_tables(self) -> np.ndarray:
        """Return addresses of the tables, and then their rows, int64 `[2 * T]`."""
        return np.array([table.data_ptr() for table in self._tables] + self._num_rows, np.int64)

    def read(self, ids: Tensor, layout: Tensor, num_rows: int) -> Tensor:
        """Return the rows of all tables one after the other, `[num_rows, ...]`.

        Args:
            ids: int64, contiguous; ids of all types.
            layout: The result of `list_layout`, int64 on the device.
        """
        rows = self._like.new_empty((num_rows, *self._row))
        if not ids.is_cuda:
            self._read_on_cpu(ids, layout, rows)
        elif num_rows and self._row_bytes:
            # Work of a row, and of a block.
            unit, of_block = self._share
            self._launch(-(-num_rows * unit // of_block), (layout, ids, rows.data_ptr()))
        return rows

    def _read_on_cpu(self, ids: Tensor, layout: Tensor, rows: Tensor) -> None:
        # Other code may move a table that stays the same tensor, for example to shared memory.
        tables, num_bytes = self._find_tables(), rows.shape[0] * self._row_bytes
        with threads_for(num_bytes // LIGHT):
            errors = np.full(cpu_chunks(), NO_POSITION)
            run_cpu(kernels.gather_typed_cpu, layout, tables, ids, self._row_bytes, use_large_pages(rows).data_ptr(),
                    len(errors), errors)  # fmt: skip
        if (place := int(errors.min())) != NO_POSITION:
            starts, count = layout.numpy(), len(self._tables)
            number = int(np.searchsorted(starts[: count + 1], place, side="right")) - 1
            raise IdError(f"ids must lie in [0, {self._num_rows[number]}), got "
                          f"{int(ids[place + starts[count + 1 + number]])}")  # fmt: skip


_UNITS = (torch.int64, torch.uint32, torch.int16, torch.uint8)


def scatter_rows(table: Tensor, ids: Tensor, rows: Tensor, *, errors: Tensor | None = None,
                 is_unique: bool = False) -> None:  # fmt: skip
    """Write `rows[i]` to row `ids[i]` of a table, bit for bit; of an id that comes several times, the last one.

    Args:
        table: `[N, ...]`, contiguous, readable and writable by the device of the ids.
        ids: int32 or int64 `[n]`, on the device that does the work.
        rows: `[n, ...]` of the table's dtype, on that device.
        errors: On a GPU: int64 `[1]` that gets the lowest position of an id out of range, which is not written.
            Ids on the CPU are checked before anything is written.
        is_unique: No id comes twice, which saves sorting them.
    """
    ids = check_ids("ids", ids, table.shape[0])
    shape = (ids.numel(), *table.shape[1:])
    if rows.shape != shape or rows.dtype != table.dtype or rows.device != ids.device:
        raise ArgumentError(f"rows must be {shape} of {table.dtype} on {ids.device}, got {tuple(rows.shape)} of "
                            f"{rows.dtype} on {rows.device}")  # fmt: skip
    if not table.is_contiguous():
        raise ArgumentError("table must be contiguous, got a strided tensor")
    if rows.numel() == 0:
        return
    rows = rows.detach().resolve_conj().resolve_neg().contiguous()
    errors = unread_errors(ids.device) if errors is None else errors
    if not is_unique and ids.numel() > 1:
        ids, rows = keep_last(ids, rows)
    unit = widest_unit(rows, table, table, _UNITS)
    source, target = rows_in_units(rows, unit), rows_in_units(table, unit)
    if runs_on_gpu(ids):
        run_gpu(kernels.scatter_items_gpu, min(full_grid(ids), grid_for(source.numel(), ids)), source.view(-1), ids,
                table.shape[0], source.shape[1], target.view(-1), errors)  # fmt: skip
    else:
        run_cpu(kernels.scatter_rows_cpu, source, ids, target)


def keep_last(ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return all ids and rows in order if no id comes twice, otherwise the last of each."""
    ordered, order = ids.sort(stable=True)
    is_last = torch.ones_like(ordered, dtype=torch.bool)
    torch.ne(ordered[1:], ordered[:-1], out=is_last[:-1])
    kept = order[is_last].sort().values
    if kept.numel() == ids.numel():
        return ids, rows
    if not rows.numel():
        return ids[kept], rows[: kept.numel()]
    flat = as_bytes(rows).view(len(rows), -1)
    return ids[kept], flat[kept].view(-1).view(rows.dtype).view(kept.numel(), *rows.shape[1:])


# Blocks that read rows which keep all threads busy, from unified and from page-locked memory. On an H100 and an H200
# more were less than 2 % faster.
DEFAULT_BLOCKS = 4
# Lowest share of the read rows that is assumed to come from host memory. If more blocks are needed beside hot rows than
# without: the multiple up to which all are taken, and the share beyond it.
_LEAST_MISSES, _ENOUGH_BESIDE_HOT, _MORE_BESIDE_HOT = 1 / 16, 1.15, 0.05
# For rows from other GPUs too, whose latency is higher. The share of the needed blocks if few rows miss, and the
# highest multiple of the blocks without hot rows.
_ENOUGH_BESIDE_PEERS, _MOST_BESIDE_PEERS = 0.35, 5.3


def blocks_for_rows(blocks: int, stored_bytes: int, row_bytes: int) -> int:
    """Return the number of blocks that have as many bytes in flight as `blocks` for rows that keep all threads busy.

    Args:
        blocks: Blocks for rows that keep all threads busy, such as `DEFAULT_BLOCKS`.
        stored_bytes: Bytes of a stored row.
        row_bytes: Bytes of a row in the result.
    """
    lanes = 1 << group_bits(row_bytes)
    room = -(-row_bytes // (PIECE * lanes)) * PIECE * lanes
    return math.ceil(blocks * room / max(1, stored_bytes))


def blocks_beside_hot(blocks: int, misses: float, has_peers: bool = False) -> int:
    """Return the number of blocks for reads with the share `misses` on the host. The rest is in GPU memory, including
    peers' memory if `has_peers`.

    As many waits for the link take 1 / `misses` times as many blocks. But if few rows miss, the link does not limit a
    step, and each block takes a multiprocessor from the model. Measured in one run on an H200, with a replayed step of
    GraphSAGE whose products leave 6 multiprocessors (ms a step; ms of the rows alone in parentheses):

    - 20 % cached, 0.58 of the reads hit: 3 blocks 2.50 (2.23), 4 blocks 2.11 (1.72), 5 blocks 2.12 (1.50), 6 blocks
      2.15 (1.47), 8 blocks 2.32 (1.47).
    - 60 % cached, 0.93 hit: 4 blocks 2.09, 6 blocks 2.07, 12 blocks 2.08.
    - 5 % cached, 0.23 hit: 4 blocks 2.86, 6 blocks 2.80.
    - None cached: 2 blocks 3.92, 3 blocks 3.65, 4 blocks 3.60.

    Measured on four H200 that cache for each other; GB/s, and ms of epochs of 60 batches of 4,096 seeds in parentheses
    (the last one with 24 blocks):

    - Each caches 20 %, 0.045 of the reads miss: 6 blocks 185 (176), 8 blocks 232 (159), 12 blocks 289 (147), 16 blocks
      300 (145), 32 blocks 315 (24 blocks: 165).
    - Each caches 10 %, 0.244 miss: 4 blocks 99, 6 blocks 102, 16 blocks 104, 32 blocks 107.
    """
    needed = 1 / max(misses, _LEAST_MISSES)
    enough = _ENOUGH_BESIDE_HOT + _MORE_BESIDE_HOT * (needed - _ENOUGH_BESIDE_HOT)
    if has_peers:
        enough = max(enough, min(_ENOUGH_BESIDE_PEERS * needed, _MOST_BESIDE_PEERS))
    return math.ceil(blocks * min(needed, enough))
