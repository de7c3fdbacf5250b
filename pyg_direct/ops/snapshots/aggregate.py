"""Aggregation of several snapshots at once, differentiable (see `kernels/snapshots/sliced_csr.py`).

Y[:, t] = d_t * X[:, t] + a_t * (W_t (b_t * X[:, t])) for the S snapshots t of a group. Their sparse matrices W_t
share edges, and one pass over the shared edges serves all of them.

`choose_kernel` selects the kernel that sums the edges of a structure on a GPU. `aggregate_by_edge` sums edge by
edge by torch's functions, for rows that are a batch, which our own loops cannot read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_direct.compiler.jit import SIMULATED, THREADS
from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.kernels.snapshots import sliced_csr as kernels
from pyg_direct.ops.argument_checks import check_same_device
from pyg_direct.ops.run_kernel import (
    choose_lane_bits,
    full_grid,
    grid_of,
    is_batch,
    is_transformed,
    run_cpu,
    run_gpu,
    runs_on_gpu,
    threads_for,
)
from pyg_direct.ops.snapshots.slice_csr import SlicedCSR, address_of, scales_here, sum_scaled

# Numbers of a row from which sums over CSR are faster than sums over slices, without and with weights. The cases are
# edges of all snapshots, edges under a mask, and edges of one snapshot. ms over CSR / as slices:
# - H100, GCN's factors, 4 snapshots of 880,000 nodes, 9.5 million edges of all snapshots (CSR) and 14 million of one
#   (slices): 4 numbers a snapshot 0.75 / 0.81.
# - The 14 million edges of one snapshot over CSR: 8 numbers 1.11 / 1.11, 16 numbers 1.84 / 2.02, 64 numbers 6.39 /
#   7.46.
# - With weights, the 9.5 million: 4 numbers 1.13 / 0.95, 8 numbers 1.57 / 1.57, 16 numbers 2.58 / 2.75.
# - With weights, 45 million edges of one snapshot: 16 numbers 3.72 / 2.72, 32 numbers 5.43 / 4.57, 64 numbers 9.02 /
#   8.27.
# - H200 under a mask, 43 million edges, 2.3 million nodes: 2 numbers 1.06 / 0.94, 4 numbers 1.12 / 1.37, 8 numbers 1.40
#   / 2.12.
# - The same with weights, 17 million edges: 4 numbers 0.66 / 0.65, 8 numbers 0.82 / 1.03.
WIDE_ROW, WIDE_ROW_MASKED, WIDE_ROW_ALONE = (16, 32), (16, 16), (16, 128)
# Mean edges of a target below which half as many numbers of the first two are enough. With 2.9 edges on an H200, rows
# of 8 take 0.38 ms instead of 0.50, and 0.36 instead of 0.48 under a mask.
_SHORT_ROW = 6
# Numbers of all edges, and of edges under a mask, below which slices are faster. A sum over CSR takes 15 to 25 us more
# of the host's time, and 100 if a structure was sent for it. us over CSR / as slices:
# - H100: 8 million numbers 106 / 78, 15 million 131 / 128, 30 million 212 / 241.
# - H200, under a mask: 21 million 46 / 35, 35 million 49 / 49, 42 million 48 / 52, 83 million 75 / 100.
MANY_NUMBERS, MANY_MASKED = 2**24, 2**25
# Numbers of all sums under a mask below which CSR keeps too few threads of a GPU busy. 5,000 nodes of 512 numbers take
# 86 us instead of 40, and 50,000 nodes of 64 numbers 56 instead of 63.
MANY_SUMS = 3_000_000
# Numbers that a thread group stages for narrow rows; wider rows are read in pieces.
NARROW = min(32, THREADS)
# Counters of 32 bits run a few rows ahead.
_MOST = 2**31 - 8
# Alignment of four fp32 numbers that are read at once.
_ALIGNED_BYTES = 16


def choose_kernel(z: Tensor, piece: SlicedCSR, deterministic: bool) -> str:
    """Choose the kernel that sums a structure's edges on a GPU: "rows" of CSR, or its slices "wide", "narrow" or
    "plain".
    """
    size, channels = z.shape[1:]
    width = channels if piece.snapshot is not None else size * channels
    # The pieces of a slice of one snapshot begin at that snapshot's numbers.
    aligned = (size * channels) % 4 == 0 and width % 4 == 0 and z.data_ptr() % _ALIGNED_BYTES == 0
    if z.dtype == torch.float32 and aligned and not SIMULATED:
        return "rows" if _has_rows(piece, size, channels, deterministic) else "wide"
    return "narrow" if 1 < width <= NARROW and not deterministic else "plain"


def _has_rows(piece: SlicedCSR, size: int, channels: int, deterministic: bool) -> bool:
    """Report whether rows are wide enough and many, and edges bring all numbers, or all of one snapshot, with one
    weight for four.

    If equal calls must give equal results, slices take several times as long, at any width.
    """
    if max(piece.num_rows * piece.num_snapshots, piece.num_edges) >= _MOST:
        return False
    if piece.weight is not None and piece.weight.dtype != torch.float32:
        return False
    if piece.presence is not None and not leaves_bits(piece.num_rows, piece.num_snapshots):
        return False
    weighted = piece.weight is not None
    if piece.snapshot is not None:
        num_sums = piece.num_rows * piece.num_snapshots
        is_wide = is_summed_over_csr("one", piece.num_edges, num_sums, channels, weighted)
        return size == piece.num_snapshots and (is_wide or deterministic)
    whose = "all" if piece.presence is None else "mask"
    is_wide = is_summed_over_csr(whose, piece.num_edges, piece.num_rows, size * channels, weighted)
    if not is_wide and not deterministic:
        return False
    return piece.weight is None or piece.weight.shape[1] == 1 or channels % 4 == 0


def leaves_bits(num_rows: int, num_snapshots: int) -> bool:
    """Report whether ids of 32 bits have one bit left for each snapshot, which marks over CSR that it has an edge."""
    return num_rows <= 1 << 32 - num_snapshots


def is_summed_over_csr(whose: str, num_edges: int, num_sums: int, numbers: int, weighted: bool) -> bool:
    """Report whether so many edges, which bring so many numbers each to one of the sums, are summed over CSR.

    Args:
        whose: Edges that "all" snapshots have, that have a "mask", or that belong to "one".
        weighted: True if edges have weights.
    """
    wide_rows = {"all": WIDE_ROW, "mask": WIDE_ROW_MASKED, "one": WIDE_ROW_ALONE}
    least = wide_rows[whose][weighted]
    if whose != "one" and num_edges < _SHORT_ROW * num_sums:
        least //= 2
    if whose == "mask" and num_sums * numbers < MANY_SUMS:
        return False
    return numbers >= least and num_edges * numbers >= (MANY_MASKED if whose == "mask" else MANY_NUMBERS)


Factors = tuple[Tensor | None, Tensor | None, Tensor | None]


def aggregate_by_edge(x: Tensor, pieces: tuple[SlicedCSR, ...], factors: Factors, low: int, transposed: bool) -> Tensor:
    """Compute d * x + a * (W (b * x)), or with `transposed` d * x + b * (W^T (a * x)).

    Args:
        x: Rows of each node in each snapshot, fp32 or float64 `[N, S', F]`.
        pieces: Structures whose sum is W, edges by target.
        factors: a, b and d of these snapshots, `[N, S']`.
        low: The group's first snapshot that `x` holds.

    Returns:
        `[N, S', F]`.
    """
    row, column, diagonal = (None if factor is None else factor.unsqueeze(2) for factor in factors)
    before, behind = (row, column) if transposed else (column, row)
    z = x if before is None else x * before
    total = torch.zeros_like(z)
    for piece in pieces:
        total = total + _sum_piece(z, piece, low, transposed)
    total = total if behind is None else total * behind
    return total if diagonal is None else total + x * diagonal


def _sum_piece(z: Tensor, piece: SlicedCSR, low: int, transposed: bool) -> Tensor:
    ends = piece.cols.long(), piece.expand_rows()
    weight = torch.ones(1, 1, device=ends[0].device) if piece.weight is None else piece.weight
    weight = weight.to(z.dtype).expand(piece.num_edges, piece.num_snapshots)
    numbers = torch.arange(piece.num_snapshots, device=weight.device)
    if piece.presence is not None:
        weight = weight * ((piece.presence.long().unsqueeze(1) >> numbers) & 1)
    owner = piece.list_owners()
    if owner is not None:
        weight = weight * (owner.unsqueeze(1) == numbers)
    sources, targets = ends[::-1] if transposed else ends
    shares = weight[:, low : low + z.shape[1]].unsqueeze(2)
    return torch.zeros_like(z).index_add(0, targets, z.index_select(0, sources) * shares)


_DTYPES = (torch.float32, torch.float64)
# Products that one CPU thread does at once: starting threads would take longer.
SMALL = 2**18
# Products that take as long as an item of `threads_for`.
_AN_ITEM = 32


@dataclass(eq=False)
class SnapshotMatrices:
    """Sparse matrices of consecutive snapshots, shared edges held once.

    Attributes:
        pieces: Structures whose sum is W: the overlap and the exclusives, or the union under its mask.
        row, column, diagonal: a, b and d, fp32 or float64 `[N, S]`; None for ones, ones and zeros.
        num_nodes, num_snapshots: N, S.
    """

    pieces: tuple[SlicedCSR, ...]
    row: Tensor | None
    column: Tensor | None
    diagonal: Tensor | None
    num_nodes: int
    num_snapshots: int
    _by_source: tuple[SlicedCSR, ...] | None = field(default=None, repr=False)

    @property
    def device(self) -> torch.device:
        """Device of the matrices."""
        return self.pieces[0].cols.device

    @property
    def is_symmetric(self) -> bool:
        """Report whether edges by source are known to equal edges by target; False before the first gradient."""
        return self._by_source is self.pieces

    @property
    def num_bytes(self) -> int:
        """Memory of structures and factors."""
        # If rows and columns are scaled alike, both are one tensor.
        factors = {id(f): f for f in (self.row, self.column, self.diagonal) if f is not None}.values()
        by_source = () if self._by_source is None or self.is_symmetric else self._by_source
        return sum(p.num_bytes for p in self.pieces + by_source) + sum(f.numel() * f.element_size() for f in factors)

    def to(self, device: torch.device, non_blocking: bool = False) -> SnapshotMatrices:
        """Copy to a device; return self if it is there."""
        if self.device == device:
            return self
        return self._copy(lambda part: part.to(device, non_blocking=non_blocking))

    def _copy(self, copy: Callable[[Any], Any]) -> SnapshotMatrices:
        """Return the matrices with copies of all structures and factors."""
        pieces = tuple(map(copy, self.pieces))
        by_source = self._by_source
        if by_source is not None:
            by_source = pieces if by_source is self.pieces else tuple(map(copy, by_source))
        row, column, diagonal = (None if f is None else copy(f) for f in (self.row, self.column, self.diagonal))
        column = row if self.column is self.row else column
        return replace(self, pieces=pieces, row=row, column=column, diagonal=diagonal, _by_source=by_source)

    def by_source(self) -> tuple[SlicedCSR, ...]:
        """Return the structures with sources and targets exchanged, made once; the same ones if symmetric."""
        if self._by_source is None:
            turned = tuple(piece.transpose() for piece in self.pieces)
            same = all(a.equals(b) for a, b in zip(turned, self.pieces, strict=True))
            self._by_source = self.pieces if same else turned
        return self._by_source


def aggregate_snapshots(x: Tensor, matrices: SnapshotMatrices, low: int = 0,
                        deterministic: bool | None = None) -> Tensor:  # fmt: skip
    """Aggregate snapshots [low, low + S') of a group at once.

    Args:
        x: Rows of each node in each snapshot, fp32 or float64 `[N, S', F]`.
        matrices: Matrices of the group, on the device of `x`.
        low: The group's first snapshot that `x` holds.
        deterministic: Equal calls give equal results to the last bit. On a GPU one thread group then adds the edges of
            a target, in order. None asks torch. On a CPU results are always deterministic.

    Returns:
        `[N, S', F]`.
    """
    if x.dtype not in _DTYPES or x.dim() != 3:
        raise ArgumentTypeError(f"x must be fp32 or float64 [N, S, F], got {x.dtype} with shape {tuple(x.shape)}")
    if x.shape[0] != matrices.num_nodes or not 0 <= low <= low + x.shape[1] <= matrices.num_snapshots:
        raise ArgumentError(
            f"x must hold {matrices.num_nodes} nodes and snapshots from {low=} on of a group of "
            f"{matrices.num_snapshots}, got shape {tuple(x.shape)}"
        )
    check_same_device("matrices", matrices.pieces[0].cols, "x", x)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    if torch.is_grad_enabled() and x.requires_grad:
        return _Aggregate.apply(x, matrices, low, deterministic, False)
    return _multiply(x, matrices, low, deterministic)


def multiply_snapshots(x: Tensor, matrices: SnapshotMatrices, low: int = 0, transposed: bool = False) -> Tensor:
    """Compute `aggregate_snapshots` of a checked `x`, or its adjoint, without a gradient outside transforms."""
    if _goes_by_edge(x):
        return _by_edge(x, matrices, low, transposed)
    deterministic = torch.are_deterministic_algorithms_enabled()
    return (_backward if transposed else _multiply)(x, matrices, low, deterministic)


class Part(NamedTuple):
    """`size` snapshots of a group, from its snapshot `low` on."""

    matrices: SnapshotMatrices
    low: int
    size: int


def multiply_parts(x: Tensor, parts: Iterable[Part], transposed: bool = False) -> Tensor:
    """Compute `multiply_snapshots` of snapshots that lie in several groups, in order, `[N, W, F]`."""
    begin = 0
    if runs_on_gpu(x) or _goes_by_edge(x):
        apart = []
        for matrices, low, count in parts:
            rows = x.narrow(1, begin, count).contiguous()
            apart.append(multiply_snapshots(rows, matrices, low, transposed))
            begin += count
        return apart[0] if len(apart) == 1 else torch.cat(apart, 1)
    x = x.detach().contiguous()
    out = torch.empty_like(x)
    for matrices, low, count in parts:
        rows = x[:, begin : begin + count]
        row, column, diagonal = _factors(matrices, low, rows)
        pieces = matrices.by_source() if transposed else matrices.pieces
        factors = (column, row, diagonal) if transposed else (row, column, diagonal)
        _sum_on_cpu(x, pieces, factors, low, range(begin, begin + count), out)
        begin += count
    return out


_Factors = tuple[Tensor | None, Tensor | None, Tensor | None]


def _factors(matrices: SnapshotMatrices, low: int, x: Tensor) -> _Factors:
    """Return a, b and d of the snapshots that `x` holds."""

    def cut(factor: Tensor | None) -> Tensor | None:
        if factor is None or (factor.shape[1] == x.shape[1] and factor.dtype == x.dtype):
            return factor
        return factor[:, low : low + x.shape[1]].to(x.dtype).contiguous()

    return cut(matrices.row), cut(matrices.column), cut(matrices.diagonal)


def _goes_by_edge(x: Tensor) -> bool:
    """Report whether neither loops nor kernels can read the rows, or report their work to a transform."""
    return is_batch(x) or is_transformed()


def _by_edge(x: Tensor, matrices: SnapshotMatrices, low: int, transposed: bool) -> Tensor:
    return aggregate_by_edge(x, matrices.pieces, _factors(matrices, low, x), low, transposed)


def _multiply(x: Tensor, matrices: SnapshotMatrices, low: int, deterministic: bool) -> Tensor:
    return _forward(x, matrices.pieces, _factors(matrices, low, x), low, deterministic)


def _backward(grad: Tensor, matrices: SnapshotMatrices, low: int, deterministic: bool) -> Tensor:
    row, column, diagonal = _factors(matrices, low, grad)
    return _forward(grad, matrices.by_source(), (column, row, diagonal), low, deterministic)


def _start(x: Tensor, diagonal: Tensor | None) -> Tensor:
    return torch.zeros_like(x) if diagonal is None else x * diagonal.unsqueeze(2)


def _forward(x: Tensor, pieces: tuple[SlicedCSR, ...], factors: _Factors, low: int, deterministic: bool) -> Tensor:
    x = x.detach().contiguous()
    if runs_on_gpu(x):
        pieces = tuple(piece for piece in pieces if piece.num_edges > 0 and x.numel() > 0)
        return _forward_on_gpu(x, pieces, factors, low, deterministic)
    out = torch.empty_like(x)
    _sum_on_cpu(x, pieces, factors, low, range(x.shape[1]), out)
    return out


def _sum_on_cpu(x: Tensor, pieces: tuple[SlicedCSR, ...], factors: _Factors, low: int, places: range,
                out: Tensor) -> None:  # fmt: skip
    """Compute as `_forward` from the snapshots at these places of `x` `[N, W, F]` to the places of `out`."""
    (row, column, diagonal), (count, channels) = factors, (len(places), x.shape[2])
    mine = slice(places.start, places.stop)
    if diagonal is None:
        out[:, mine] = 0
    elif count == x.shape[1]:
        torch.mul(x, diagonal.unsqueeze(2), out=out)
    else:
        torch.mul(x[:, mine], diagonal.unsqueeze(2), out=out[:, mine])
    none = x.new_empty(0, 0)
    row, column = (none if factor is None else factor for factor in (row, column))
    for piece in pieces:
        width = channels if piece.snapshot is not None else count * channels
        with threads_for(piece.num_edges * width // _AN_ITEM):
            arrays = piece.loop_arrays if x.dtype == torch.float32 else _arrays(piece, None, x)[:-1]
            run_cpu(kernels.sum_slices_cpu, x.view(-1), *arrays, low, row, column, places.start, count, channels,
                    x.shape[1] * channels, out.view(-1))  # fmt: skip


def _forward_on_gpu(x: Tensor, pieces: tuple[SlicedCSR, ...], factors: _Factors, low: int,
                    deterministic: bool) -> Tensor:  # fmt: skip
    row, column, diagonal = factors
    chosen = [choose_kernel(x, piece, deterministic) for piece in pieces]
    is_scaled = column is None or (set(chosen) == {"rows"} and scales_here(x.shape[2]))
    z = x if column is None or is_scaled else x * column.unsqueeze(2)
    out: Tensor | None = None
    for kernel, piece in zip(chosen, pieces, strict=True):
        if kernel == "rows":
            out = sum_rows(x, z, piece, (row, column if is_scaled else None, diagonal), low, out)
            continue
        fresh = out is None and diagonal is None
        out = _start(x, diagonal) if out is None else out
        _sum(z, piece, row, low, deterministic, out, kernel, fresh)
    return _start(x, diagonal) if out is None else out


def sum_rows(x: Tensor, z: Tensor, piece: SlicedCSR, factors: _Factors, low: int, out: Tensor | None) -> Tensor:
    """Compute d * x + a * (W (b * z)) on a GPU over CSR, or add to `out`; `z` is `x`, or `x` multiplied by b."""
    shape = x.shape
    if piece.snapshot is not None:
        # Rows of all snapshots form one graph of N * S nodes.
        x, z = x.view(-1, 1, shape[2]), z.view(-1, 1, shape[2])
        out = None if out is None else out.view(-1, 1, shape[2])
    row, column, diagonal = (None if f is None else f.contiguous().view(x.shape[:2]) for f in factors)
    rest = None if out is not None else diagonal
    return sum_scaled(z, piece.csr, piece.weight, low, column, row, x, rest, out).view(shape)


class _Aggregate(torch.autograd.Function):
    """Linear in `x`; its adjoint exchanges sources and targets, a and b, and has this function as its adjoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrices: SnapshotMatrices, low: int, deterministic: bool,
                transposed: bool) -> Tensor:  # fmt: skip
        ctx.given = matrices, low, deterministic, not transposed
        return _Aggregate.compute(x, matrices, low, deterministic, transposed)

    @staticmethod
    def compute(x: Tensor, matrices: SnapshotMatrices, low: int, deterministic: bool, transposed: bool) -> Tensor:
        """Compute without a gradient."""
        return (_backward if transposed else _multiply)(x, matrices, low, deterministic)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if _goes_by_edge(grad):
            matrices, low, _, transposed = ctx.given
            return _by_edge(grad, matrices, low, transposed), None, None, None, None
        # Gradients of gradients are rarely requested.
        pull = _Aggregate.apply if torch.is_grad_enabled() else _Aggregate.compute
        return pull(grad, *ctx.given), None, None, None, None


def multiply_slices(x: Tensor, piece: SlicedCSR, low: int = 0, deterministic: bool | None = None) -> Tensor:
    """Compute W x for `[N, S', F]` of snapshots from `low` on, slice by slice. With `deterministic` (None asks torch)
    the slices of a target are added one after the other.

    Weights come from `piece`, without factors. Slices of snapshots that `x` does not hold may have any number of edges
    and add nothing.
    """
    assert x.shape[0] == piece.num_rows, "rows of all nodes"
    if not runs_on_gpu(x):
        return _forward(x, (piece,), (None, None, None), low, True)
    x, out = x.contiguous(), torch.zeros_like(x, memory_format=torch.contiguous_format)
    if x.numel() > 0:
        if deterministic is None:
            deterministic = torch.are_deterministic_algorithms_enabled()
        kernel = choose_kernel(x, piece, deterministic)
        # The narrow kernel has room for slices of the usual size, and slices need not ascend.
        kernel = {"narrow": "plain", "rows": "wide"}.get(kernel, kernel)
        _sum(x, piece, None, low, deterministic, out, kernel, True)
    return out


def _arrays(piece: SlicedCSR, scale: Tensor | None, like: Tensor) -> tuple[Any, ...]:
    """Return the arguments of the kernels that describe a structure; empty arrays for missing ones."""
    none = like.new_empty(0)
    bytes_ = torch.empty(0, dtype=torch.uint8, device=like.device)
    weight = none if piece.weight is None else piece.weight.to(like.dtype).reshape(-1)
    return (piece.rows, piece.offsets, piece.cols, weight, 0 if piece.weight is None else piece.weight.shape[1],
            bytes_ if piece.snapshot is None else piece.snapshot,
            bytes_ if piece.presence is None else piece.presence,
            none if scale is None else scale.reshape(-1))  # fmt: skip


def _sum(z: Tensor, piece: SlicedCSR, scale: Tensor | None, low: int, deterministic: bool, out: Tensor,
         kernel: str, fresh: bool = False) -> None:  # fmt: skip
    """Add the sums of a structure's slices to `out`, on a GPU; with `fresh` it is zero."""
    size, channels = z.shape[1:]
    arrays = _arrays(piece, scale, z)
    width = channels if piece.snapshot is not None else size * channels
    whole = int(deterministic)
    if kernel == "wide":
        lane_bits = choose_lane_bits(width // 4)
        threads = piece.num_slices * (-(-(width // 4) // (1 << lane_bits)) << lane_bits)
        rows, offsets, cols, weight, num_weights, snapshot, presence, scales = arrays
        run_gpu(kernels.sum_wide_slices_gpu, grid_of(threads, 0), z.data_ptr(), rows, offsets, cols.data_ptr(),
                address_of(weight), num_weights, snapshot, address_of(presence), address_of(scales), low, size,
                channels, lane_bits, whole, int(fresh), out.data_ptr())  # fmt: skip
    elif kernel == "narrow":
        coalesced = min(kernels.COALESCED, NARROW // width)
        slices = coalesced * (THREADS // NARROW)
        grid = min(full_grid(z), max(1, -(-piece.num_slices // slices)))
        run_gpu(kernels.sum_narrow_slices_gpu, grid, z.view(-1), *arrays, low, size, channels, coalesced,
                out.view(-1))  # fmt: skip
    else:
        lane_bits = choose_lane_bits(width)
        run_gpu(kernels.sum_slices_gpu, grid_of(piece.num_slices, lane_bits), z.view(-1), *arrays, low, size, channels,
                lane_bits, whole, out.view(-1))  # fmt: skip
