"""Operators behind `ops/aggregate/sum_rows.py`: they allocate and launch on the device of the tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_direct.compiler.jit import SIMULATED, THREADS
from pyg_direct.kernels.aggregate import max_min, sum as kernels
from pyg_direct.kernels.aggregate.sum import LONG_ROW, SLICE, find_slices_gpu
from pyg_direct.ops.run_kernel import (
    choose_lane_bits,
    cpu_chunks,
    full_grid,
    grid_for,
    grid_of,
    run_cpu,
    run_gpu,
    runs_on_gpu,
    threads_for,
)

# Numbers as in `cuda_src/aggregate.cu`.
WIDE_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
PIECE = 16
# Numbers of a row, from which on a block shares one whose memory is not aligned.
_WIDE = 1024
# Counters of 32 bits run a few rows ahead.
_MOST = 2**31 - 8
# Blocks of sums that a multiprocessor holds, least number of times that a GPU is filled, and most targets of a thread.
# On an H200, threads of four targets each add rows of 512 bytes at 4.2 TB/s, threads of one at 3.3.
_RESIDENT_BLOCKS = 4
_FULL = 3
_LONGEST_RUN = 8
# Numbers that a CPU adds up in the time of one item of `threads_for`.
_LIGHT = 16
# Bytes of a gradient from which on its rows are summed by source instead. Atomics would read and write memory for each,
# and 16-bit rows would be rounded afterwards. On an H200, the sort included: 38 MB take 14 us longer, 154 MB 35 us
# less, and 835 MB 0.76 ms instead of 1.2.
GATHERED_BYTES = 80 << 20

_SCHEMAS = (
    "sum_rows(Tensor x, Tensor indptr, Tensor? row, Tensor? weight, SymInt num_targets, bool mean, int max_degree)"
    " -> Tensor",
    "spread_rows(Tensor grad, Tensor indptr, Tensor row, Tensor target, Tensor? weight, SymInt num_rows, bool mean,"
    " int max_degree) -> Tensor",
    "dot_rows(Tensor grad, Tensor x, Tensor indptr, Tensor? row, Tensor target, int heads, bool mean) -> Tensor",
    "extreme_rows(Tensor x, Tensor indptr, Tensor? row, SymInt num_targets, bool largest, int max_degree) -> Tensor",
    "spread_extremes(Tensor grad, Tensor x, Tensor best, Tensor indptr, Tensor? row, bool to_edges, int max_degree)"
    " -> Tensor",
)
_NONE: dict[tuple[torch.device, torch.dtype], Tensor] = {}
_library = torch.library.Library("pyg_direct", "DEF")


class _Operators(NamedTuple):
    sum_rows: Any
    spread_rows: Any
    dot_rows: Any
    extreme_rows: Any
    spread_extremes: Any


def operators() -> _Operators:
    """Return the registered operators, ready to call."""
    return _Operators(*(getattr(torch.ops.pyg_direct, name).default for name in _Operators._fields))


class LongRows(NamedTuple):
    """Work space for long rows, empty if there are none."""

    slices: Tensor
    hubs: Tensor
    counts: Tensor

    @classmethod
    def of(cls, indptr: Tensor, num_edges: int, num_targets: int, max_degree: int,
           sizes: tuple[int, int] | None = None) -> LongRows:  # fmt: skip
        """List the slices of long rows on the device, unless `max_degree` or `sizes` rule them out."""
        most_hubs = num_edges // LONG_ROW
        most_hubs, most_slices = (most_hubs, num_edges // SLICE + most_hubs) if sizes is None else sizes
        if num_edges <= LONG_ROW or 0 <= max_degree <= LONG_ROW or most_hubs == 0:
            none = _none(indptr, torch.int32)
            return cls(none, none, none)
        space = torch.empty(2 * (most_slices + most_hubs), dtype=torch.int32, device=indptr.device)
        counts = torch.zeros(2, dtype=torch.int32, device=indptr.device)
        made = cls(space[: 2 * most_slices], space[2 * most_slices :], counts)
        run_gpu(find_slices_gpu, grid_for(num_targets, indptr), indptr, num_edges, num_targets, *made)
        return made

    @staticmethod
    def measure(degrees: Tensor) -> tuple[int, int]:
        """Return how many rows of these degrees are long, and how many slices they have; waits for their device."""
        degrees = degrees[degrees > LONG_ROW]
        if degrees.numel() == 0:
            return 0, 0
        # As in `kernels/aggregate/sum.py`: doubled until its square is no less than the degree.
        squares = SLICE * SLICE << 2 * torch.arange(16, device=degrees.device)
        length = SLICE << torch.bucketize(degrees, squares)
        return degrees.numel(), int(((degrees + length - 1) // length).sum())

    @property
    def capacity(self) -> int:
        """Most slices."""
        return self.slices.numel() // 2

    def make_partials(self, width: int, dtype: torch.dtype) -> Tensor:
        """Return memory for a row of each slice."""
        if self.capacity == 0:
            return _none(self.slices, dtype)
        return torch.empty(self.capacity * width, dtype=dtype, device=self.slices.device)

    def add_partials(self, indptr: Tensor, num_edges: int, width: int, partials: Tensor, out: Tensor) -> None:
        """Write the sums of long rows, from the sums of their slices."""
        if self.capacity == 0:
            return
        given, grid = (self.hubs, self.counts, partials), self.grid_of_hubs(-(-width // 32))
        if out.dtype == partials.dtype:
            run_gpu(kernels.add_slices_gpu, grid, indptr, num_edges, width, *given, out.view(-1))
        else:
            run_gpu(kernels.add_narrowed_slices_gpu, grid, indptr, num_edges, width,
                    WIDE_KINDS[out.dtype], *given, out.data_ptr())  # fmt: skip

    def grid_of_hubs(self, pieces: int = 1) -> int:
        """Return blocks of a grid whose warps share the long rows, or pieces of these."""
        return min(full_grid(self.hubs), max(1, self.hubs.numel() // 2 * pieces * 32 // THREADS))


def _share_pieces(num_items: int, pieces: int) -> tuple[int, int]:
    """Return (blocks, logarithm of threads that share a row) of a grid with a thread for each piece of an item."""
    lane_bits = choose_lane_bits(pieces)
    return grid_of(num_items * -(-pieces // (1 << lane_bits)), lane_bits), lane_bits


def length_of_run(num_pieces: int, like: Tensor) -> int:
    """Return the targets of a thread: so many that its waits overlap while the GPU is filled several times."""
    return max(1, min(_LONGEST_RUN, num_pieces // (_FULL * full_grid(like, _RESIDENT_BLOCKS) * THREADS)))


def _none(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an empty tensor, made once, because making it takes as long as a launch."""
    key = like.device, dtype
    if key not in _NONE:
        _NONE[key] = torch.empty(0, dtype=dtype, device=like.device)
    return _NONE[key]


def _plain(tensor: Tensor | None, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor flat and contiguous in `dtype`; an empty one for None."""
    if tensor is None:
        return _none(like, dtype)
    return tensor.detach().to(dtype).reshape(-1)


def is_wide(rows: Tensor, channels: int, most: int) -> bool:
    """Report whether rows are read in pieces of 16 bytes, none of which belongs to two heads."""
    is_aligned = channels * rows.element_size() % PIECE == 0 and rows.data_ptr() % PIECE == 0
    return rows.dtype in WIDE_KINDS and is_aligned and most < _MOST and not SIMULATED


def _work_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of accumulation, which kernels without 16-bit items also read."""
    return torch.promote_types(dtype, torch.float32)


def sum_rows(x: Tensor, indptr: Tensor, row: Tensor | None, weight: Tensor | None, num_targets: int, mean: bool,
             max_degree: int) -> Tensor:  # fmt: skip
    """Sum or average `x` [N, F] over the edges of each target: [T, F]."""
    num_edges, width = x.shape[0] if row is None else row.numel(), x.shape[1]
    if num_targets == 0 or width == 0 or num_edges == 0:
        return x.new_zeros(num_targets, width)
    heads = 1 if weight is None else weight.shape[1]
    work = _work_dtype(x.dtype)
    row = _plain(row, indptr, indptr.dtype)
    if not runs_on_gpu(x):
        out = torch.empty(num_targets, heads, width // heads, dtype=work, device="cpu")
        shares = _plain(weight, x, work).view(-1, heads)
        with threads_for(num_edges * width // _LIGHT):
            run_cpu(kernels.sum_rows_cpu, _plain(x, x, work).view(-1, heads, width // heads), indptr, row, shares,
                    num_edges, int(mean), out)  # fmt: skip
        return out.view(num_targets, width).to(x.dtype)
    indptr, x = indptr.contiguous(), x.detach().contiguous()
    slices = LongRows.of(indptr, num_edges, num_targets, max_degree)
    shares = _plain(weight, x, work)
    partials = slices.make_partials(width, work)
    if is_wide(x, width // heads, max(x.shape[0], num_edges)):
        out = torch.empty(num_targets, width, dtype=x.dtype, device=x.device)
        pieces = width * x.element_size() // PIECE
        run = length_of_run(num_targets * pieces, x)
        num_runs = -(-num_targets // run)
        run_gpu(kernels.sum_wide_rows_gpu, grid_of((num_runs + slices.capacity) * pieces, 0), x.data_ptr(), indptr,
                indptr.data_ptr(), row.data_ptr(), row.element_size(), shares.data_ptr(), num_edges, num_targets,
                num_runs, run, pieces, heads, int(mean), WIDE_KINDS[x.dtype], WIDE_KINDS[out.dtype], slices.slices,
                slices.counts, partials.data_ptr(), out.data_ptr())  # fmt: skip
    else:
        out = torch.empty(num_targets, width, dtype=work, device=x.device)
        # A warp would read thousands of numbers one after the other, and few targets would not fill the GPU.
        lane_bits = choose_lane_bits(width, THREADS if width >= _WIDE else 32)
        run_gpu(kernels.sum_rows_gpu, grid_of(num_targets + slices.capacity, lane_bits), _plain(x, x, work), indptr,
                row, shares, num_edges, num_targets, width, width // heads, lane_bits, int(mean), slices.slices,
                slices.counts, partials, out.view(-1))  # fmt: skip
    slices.add_partials(indptr, num_edges, width, partials, out)
    return out.to(x.dtype)


def _gather_gradient(grad: Tensor, indptr: Tensor, row: Tensor, target: Tensor, weight: Tensor | None, num_rows: int,
                     mean: bool) -> Tensor:  # fmt: skip
    """Compute `spread_rows` as a sum over the edges of each source, which a few short kernels find."""
    num_edges, work = row.numel(), _work_dtype(grad.dtype)
    heads = 1 if weight is None else weight.shape[1]
    counts = torch.zeros(num_rows + 1, dtype=torch.int32, device=grad.device)
    rank, targets = (torch.empty(num_edges, dtype=torch.int32, device=grad.device) for _ in range(2))
    grid = grid_of(num_edges, 0)
    run_gpu(kernels.rank_edges_gpu, grid, row, counts, rank)
    offsets = counts.cumsum(0, dtype=torch.int32)
    shares = None
    if mean or weight is not None:
        shares = torch.empty(num_edges, heads, dtype=work, device=grad.device)
    run_gpu(kernels.place_edges_gpu, grid, indptr, row, target, _plain(weight, grad, work), offsets, rank, num_edges,
            heads, int(mean), targets, _plain(shares, grad, work))  # fmt: skip
    return sum_rows(grad, offsets, targets, shares, num_rows, False, -1)


def spread_rows(grad: Tensor, indptr: Tensor, row: Tensor, target: Tensor, weight: Tensor | None, num_rows: int,
                mean: bool, max_degree: int) -> Tensor:  # fmt: skip
    """Return the gradient of `sum_rows` in `x`, in any order of additions: [N, F]."""
    (num_targets, width), num_edges = grad.shape, row.numel()
    work = _work_dtype(grad.dtype)
    if num_edges == 0 or width == 0:
        return grad.new_zeros(num_rows, width)
    heads = 1 if weight is None else weight.shape[1]
    indptr, row, shares = indptr.contiguous(), _plain(row, row, indptr.dtype), _plain(weight, grad, work)
    if num_edges * width * work.itemsize >= GATHERED_BYTES and max(num_rows, num_edges, num_targets) < _MOST:
        return _gather_gradient(grad, indptr, row, _plain(target, row, indptr.dtype), weight, num_rows, mean)
    out = torch.zeros(num_rows, width, dtype=work, device=grad.device)
    if is_wide(grad, width // heads, max(num_rows, num_edges)):
        slices = LongRows.of(indptr, num_edges, num_targets, max_degree)
        pieces = width * grad.element_size() // PIECE
        grid, lane_bits = _share_pieces(num_targets + slices.capacity, pieces)
        run_gpu(kernels.spread_wide_rows_gpu, grid, grad.data_ptr(), indptr, row.data_ptr(), row.element_size(),
                shares.data_ptr(), num_edges, num_targets, pieces, heads, lane_bits, int(mean), WIDE_KINDS[grad.dtype],
                slices.slices, slices.counts, out.data_ptr())  # fmt: skip
    else:
        lane_bits = choose_lane_bits(width)
        run_gpu(kernels.spread_rows_gpu, grid_of(num_edges, lane_bits), _plain(grad, grad, work), indptr, row,
                _plain(target, row, indptr.dtype), shares, num_edges, width, width // heads, lane_bits, int(mean),
                out.view(-1))  # fmt: skip
    return out.to(grad.dtype)


def dot_rows(grad: Tensor, x: Tensor, indptr: Tensor, row: Tensor | None, target: Tensor, heads: int,
             mean: bool) -> Tensor:  # fmt: skip
    """Return the gradient of `sum_rows` in `weight`: [E, H]."""
    num_edges, width = target.numel(), x.shape[1]
    work = _work_dtype(x.dtype)
    if num_edges == 0 or width == 0:
        return torch.zeros(num_edges, heads, dtype=work, device=x.device)
    out = torch.empty(num_edges, heads, dtype=work, device=x.device)
    row, target = _plain(row, indptr, indptr.dtype), _plain(target, indptr, indptr.dtype)
    if not runs_on_gpu(x):
        by_head = [_plain(t, x, work).view(-1, heads, width // heads) for t in (grad, x)]
        with threads_for(num_edges * width // _LIGHT):
            run_cpu(kernels.dot_rows_cpu, *by_head, indptr, row, target, num_edges, int(mean), out)
        return out
    indptr, grad, x = indptr.contiguous(), grad.detach().contiguous(), x.detach().contiguous()
    if grad.dtype == x.dtype and all(is_wide(t, width // heads, max(t.shape[0], num_edges)) for t in (grad, x)):
        pieces = width * x.element_size() // PIECE
        lane_bits = choose_lane_bits(pieces // heads)
        run_gpu(kernels.dot_wide_rows_gpu, grid_of(-(-num_edges // 4) * heads, lane_bits), grad.data_ptr(),
                x.data_ptr(), indptr.data_ptr(), row.data_ptr(), target.data_ptr(), row.element_size(), num_edges,
                pieces, heads, lane_bits, int(mean), WIDE_KINDS[x.dtype], _none(x, torch.float32), out.data_ptr()
                )  # fmt: skip
    else:
        lane_bits = 0 if SIMULATED else choose_lane_bits(-(-width // heads // 4))
        run_gpu(kernels.dot_rows_gpu, grid_of(num_edges * heads, lane_bits), *(_plain(t, x, work) for t in (grad, x)),
                indptr, row, target, num_edges, width, width // heads, lane_bits, int(mean), out.view(-1))  # fmt: skip
    return out


def extreme_rows(x: Tensor, indptr: Tensor, row: Tensor | None, num_targets: int, largest: bool,
                 max_degree: int) -> Tensor:  # fmt: skip
    """Return the maximum or minimum of `x` [N, F] over the edges of each target: [T, F]."""
    num_edges, width = x.shape[0] if row is None else row.numel(), x.shape[1]
    if num_targets == 0 or width == 0 or num_edges == 0:
        return x.new_zeros(num_targets, width)
    work, sign = _work_dtype(x.dtype), 1 if largest else -1
    row = _plain(row, indptr, indptr.dtype)
    if not runs_on_gpu(x):
        out = torch.empty(num_targets, width, dtype=work, device="cpu")
        with threads_for(num_edges * width // _LIGHT):
            run_cpu(max_min.extreme_rows_cpu, _plain(x, x, work), indptr, row, num_edges, width, sign, out.view(-1))
        return out.to(x.dtype)
    indptr, x = indptr.contiguous(), x.detach().contiguous()
    slices = LongRows.of(indptr, num_edges, num_targets, max_degree)
    partials = slices.make_partials(width, work)
    if is_wide(x, width, max(x.shape[0], num_edges)):
        out = torch.empty(num_targets, width, dtype=work if slices.capacity else x.dtype, device=x.device)
        pieces = width * x.element_size() // PIECE
        run = length_of_run(num_targets * pieces, x)
        num_runs = -(-num_targets // run)
        run_gpu(max_min.extreme_wide_rows_gpu, grid_of((num_runs + slices.capacity) * pieces, 0), x.data_ptr(), indptr,
                indptr.data_ptr(), row.data_ptr(), row.element_size(), num_edges, num_targets, num_runs, run, pieces,
                sign, WIDE_KINDS[x.dtype], WIDE_KINDS[out.dtype], slices.slices, slices.counts, partials.data_ptr(),
                out.data_ptr())  # fmt: skip
    else:
        out = torch.empty(num_targets, width, dtype=work, device=x.device)
        lane_bits = choose_lane_bits(width)
        run_gpu(max_min.extreme_rows_gpu, grid_of(num_targets + slices.capacity, lane_bits), _plain(x, x, work), indptr,
                row, num_edges, num_targets, width, lane_bits, sign, slices.slices, slices.counts, partials,
                out.view(-1))  # fmt: skip
    if slices.capacity:
        run_gpu(max_min.merge_slices_gpu, slices.grid_of_hubs(), indptr, num_edges, width, sign, slices.hubs,
                slices.counts, partials, out.view(-1))  # fmt: skip
    return out.to(x.dtype)


def spread_extremes(grad: Tensor, x: Tensor, best: Tensor, indptr: Tensor, row: Tensor | None, to_edges: bool,
                    max_degree: int) -> Tensor:  # fmt: skip
    """Return the gradient of `extreme_rows` in `x`: [N, F]; with `to_edges`, the part of each edge: [E, F]."""
    (num_targets, width), num_edges = grad.shape, x.shape[0] if row is None else row.numel()
    work = _work_dtype(x.dtype)
    out = torch.zeros(num_edges if to_edges else x.shape[0], width, dtype=work, device=x.device)
    if num_edges == 0 or grad.numel() == 0:
        return out.to(x.dtype)
    row = _plain(row, indptr, indptr.dtype)
    if not runs_on_gpu(x):
        with threads_for(num_edges * width // _LIGHT):
            columns = max_min.COLUMNS * -(-width // (max_min.COLUMNS * cpu_chunks()))
            run_cpu(max_min.spread_extremes_cpu, *(_plain(t, x, work) for t in (grad, x, best)), indptr, row,
                    num_edges, width, columns, out.view(-1))  # fmt: skip
        return out.to(x.dtype)
    indptr, grad, x, best = indptr.contiguous(), *(t.detach().contiguous() for t in (grad, x, best))
    slices = LongRows.of(indptr, num_edges, num_targets, max_degree)
    equals = slices.make_partials(width, torch.int32)
    if all(is_wide(t, width, max(x.shape[0], num_edges)) for t in (grad, x, best)):
        pieces = width * x.element_size() // PIECE
        addresses = grad.data_ptr(), x.data_ptr(), best.data_ptr()

        def spread(num_items: int, of_slices: bool) -> None:
            grid, lane_bits = _share_pieces(num_items, pieces)
            run_gpu(max_min.spread_wide_extremes_gpu, grid, *addresses, indptr, row.data_ptr(), row.element_size(),
                    num_edges, num_targets, pieces, lane_bits, WIDE_KINDS[x.dtype], int(of_slices), int(to_edges),
                    slices.slices, slices.counts, equals.data_ptr(), out.data_ptr())  # fmt: skip
    else:
        rows, lane_bits = [_plain(t, x, work) for t in (grad, x, best)], choose_lane_bits(width)

        def spread(num_items: int, of_slices: bool) -> None:
            run_gpu(max_min.spread_extremes_gpu, grid_of(num_items, lane_bits), *rows, indptr, row, num_edges,
                    num_targets, width, lane_bits, int(of_slices), int(to_edges), slices.slices, slices.counts, equals,
                    out.view(-1))  # fmt: skip

    spread(num_targets + slices.capacity, of_slices=False)
    if slices.capacity:
        run_gpu(max_min.add_equals_gpu, slices.grid_of_hubs(), indptr, num_edges, width, slices.hubs, slices.counts,
                equals)  # fmt: skip
        spread(slices.capacity, of_slices=True)
    return out.to(x.dtype)


def _register() -> None:
    shapes: dict[str, Callable[..., Any]] = {
        "sum_rows": lambda x, indptr, row, weight, num_targets, mean, max_degree: x.new_empty(num_targets, x.shape[1]),
        "spread_rows": lambda grad, indptr, row, target, weight, num_rows, mean, max_degree: grad.new_empty(
            num_rows, grad.shape[1]
        ),
        "dot_rows": lambda grad, x, indptr, row, target, heads, mean: x.new_empty(
            target.numel(), heads, dtype=_work_dtype(x.dtype)
        ),
        "extreme_rows": lambda x, indptr, row, num_targets, largest, max_degree: x.new_empty(num_targets, x.shape[1]),
        "spread_extremes": lambda grad, x, best, indptr, row, to_edges, max_degree: x.new_empty(
            row.numel() if to_edges and row is not None else x.shape[0], x.shape[1]
        ),
    }
    for schema, work in zip(_SCHEMAS, (sum_rows, spread_rows, dot_rows, extreme_rows, spread_extremes), strict=True):
        _library.define(schema)
        for key in ("CPU", "CUDA"):
            _library.impl(work.__name__, work, key)
        # Not by `register_fake`, which searches all modules for its caller.
        _library.impl(work.__name__, shapes[work.__name__], "Meta")


_register()
