"""Aggregation of several snapshots at once, differentiable (see `kernels/sliced.py`).

Y[:, t] = d_t * X[:, t] + a_t * (W_t (b_t * X[:, t])) for the S snapshots t of a group whose sparse matrices W_t share
their edges: one pass over what they share serves all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.kernels import sliced as kernels
from pyg_direct.kernels.jit import THREADS
from pyg_direct.ops.by_edge import aggregate_by_edge
from pyg_direct.ops.check import check_same_device
from pyg_direct.ops.launch import (
    FEW_ITEMS,
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
from pyg_direct.ops.scaled import address_of, scales_here, sum_scaled
from pyg_direct.ops.sliced import SlicedCSR
from pyg_direct.ops.snapshot_kernels import NARROW, choose_kernel

TRANSPOSES = ("auto", "structure", "atomic")
_DTYPES = (torch.float32, torch.float64)
# Products that one CPU thread does at once: threads would take longer to start.
SMALL = 2**18


@dataclass(eq=False)
class SnapshotMatrices:
    """Sparse matrices of consecutive snapshots, shared edges held once.

    Attributes:
        pieces: Structures whose sum is W: the overlap and the exclusives, or the union under its mask.
        row, column, diagonal: a, b and d, fp32 or float64 `[N, S]`; None for ones, ones and zeros.
        num_nodes, num_snapshots: N, S.
        transpose: How gradients find the edges by source: "structure" holds them in that order too, "atomic" adds up
            by atomics (on a GPU); "auto" is "structure", and none is held twice where matrices are symmetric.
    """

    pieces: tuple[SlicedCSR, ...]
    row: Tensor | None
    column: Tensor | None
    diagonal: Tensor | None
    num_nodes: int
    num_snapshots: int
    transpose: str = "auto"
    _by_source: tuple[SlicedCSR, ...] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.transpose not in TRANSPOSES:
            raise ArgumentError(f"transpose must be one of {', '.join(TRANSPOSES)}, got {self.transpose!r}")

    @property
    def device(self) -> torch.device:
        """Where it lives."""
        return self.pieces[0].cols.device

    @property
    def is_symmetric(self) -> bool:
        """Whether edges by source are known to be those by target; nobody asks where no gradient was asked for yet."""
        return self._by_source is self.pieces

    @property
    def num_bytes(self) -> int:
        """Memory of structures and factors."""
        # Where rows and columns are scaled alike, that is one tensor.
        factors = {id(f): f for f in (self.row, self.column, self.diagonal) if f is not None}.values()
        by_source = () if self._by_source is None or self.is_symmetric else self._by_source
        return sum(p.num_bytes for p in self.pieces + by_source) + sum(f.numel() * f.element_size() for f in factors)

    def to(self, device: torch.device, non_blocking: bool = False) -> SnapshotMatrices:
        """A copy on a device, or this where it is there."""
        if self.device == device:
            return self
        return self._copy(lambda part: part.to(device, non_blocking=non_blocking))

    def _copy(self, copy: Callable[[Any], Any]) -> SnapshotMatrices:
        """The same of copies of all structures and factors."""
        pieces = tuple(map(copy, self.pieces))
        by_source = self._by_source
        if by_source is not None:
            by_source = pieces if by_source is self.pieces else tuple(map(copy, by_source))
        row, column, diagonal = (None if f is None else copy(f) for f in (self.row, self.column, self.diagonal))
        column = row if self.column is self.row else column
        return replace(self, pieces=pieces, row=row, column=column, diagonal=diagonal, _by_source=by_source)

    def by_source(self) -> tuple[SlicedCSR, ...]:
        """The structures with sources and targets exchanged; made once, and the same ones if they are symmetric."""
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
        matrices: The group's, on the device of `x`.
        low: The group's first snapshot that `x` holds.
        deterministic: Whether equal calls must give equal results to the last bit; on a GPU the edges of a target are
            then added by one thread group, in order. None asks torch. On a CPU they always do.

    Returns:
        `[N, S', F]`.

    Raises:
        ArgumentError, ArgumentTypeError: named argument, rule and value.
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
    """`aggregate_snapshots` of a checked `x`, or with `transposed` its adjoint, neither with a gradient, but within
    transforms of functions.
    """
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
    """`multiply_snapshots` of snapshots that lie in several groups, in order, `[N, W, F]`."""
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
    """a, b and d of the snapshots that `x` holds."""

    def cut(factor: Tensor | None) -> Tensor | None:
        if factor is None or (factor.shape[1] == x.shape[1] and factor.dtype == x.dtype):
            return factor
        return factor[:, low : low + x.shape[1]].to(x.dtype).contiguous()

    return cut(matrices.row), cut(matrices.column), cut(matrices.diagonal)


def _goes_by_edge(x: Tensor) -> bool:
    """Whether neither loops nor kernels can read rows, or tell a transform what they did."""
    return is_batch(x) or is_transformed()


def _by_edge(x: Tensor, matrices: SnapshotMatrices, low: int, transposed: bool) -> Tensor:
    return aggregate_by_edge(x, matrices.pieces, _factors(matrices, low, x), low, transposed)


def _multiply(x: Tensor, matrices: SnapshotMatrices, low: int, deterministic: bool) -> Tensor:
    return _forward(x, matrices.pieces, _factors(matrices, low, x), low, deterministic)


def _backward(grad: Tensor, matrices: SnapshotMatrices, low: int, deterministic: bool) -> Tensor:
    row, column, diagonal = _factors(matrices, low, grad)
    if matrices.transpose == "atomic" and runs_on_gpu(grad) and not deterministic:
        return _spread(grad, matrices.pieces, (row, column, diagonal), low)
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
    """As `_forward`, of the snapshots at these places of contiguous `x` `[N, W, F]`, to the same places of `out`."""
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
        with threads_for(piece.num_edges * width // (SMALL // FEW_ITEMS)):
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
    """d * x + a * (W (b * z)) on a GPU by a sum over CSR, or `out` with the second term added; `z` is `x`, or what b is
    multiplied into.
    """
    shape = x.shape
    if piece.snapshot is not None:
        # Rows of all snapshots are those of one graph of N * S nodes.
        x, z = x.view(-1, 1, shape[2]), z.view(-1, 1, shape[2])
        out = None if out is None else out.view(-1, 1, shape[2])
    row, column, diagonal = (None if f is None else f.contiguous().view(x.shape[:2]) for f in factors)
    rest = None if out is not None else diagonal
    return sum_scaled(z, piece.csr, piece.weight, low, column, row, x, rest, out).view(shape)


class _Aggregate(torch.autograd.Function):
    """Linear in `x`; its adjoint exchanges sources and targets, and with them a and b, and is this one's in turn."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrices: SnapshotMatrices, low: int, deterministic: bool,
                transposed: bool) -> Tensor:  # fmt: skip
        ctx.given = matrices, low, deterministic, not transposed
        return _Aggregate.compute(x, matrices, low, deterministic, transposed)

    @staticmethod
    def compute(x: Tensor, matrices: SnapshotMatrices, low: int, deterministic: bool, transposed: bool) -> Tensor:
        """Without a gradient."""
        return (_backward if transposed else _multiply)(x, matrices, low, deterministic)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if _goes_by_edge(grad):
            matrices, low, _, transposed = ctx.given
            return _by_edge(grad, matrices, low, transposed), None, None, None, None
        # Most often nobody asks for gradients of gradients.
        pull = _Aggregate.apply if torch.is_grad_enabled() else _Aggregate.compute
        return pull(grad, *ctx.given), None, None, None, None


def _spread(grad: Tensor, pieces: tuple[SlicedCSR, ...], factors: _Factors, low: int) -> Tensor:
    row, column, diagonal = factors
    grad = grad.contiguous()
    out = _start(grad, diagonal)
    scaled = grad if row is None else grad * row.unsqueeze(2)
    for piece in pieces:
        if grad.numel() > 0 and piece.num_edges > 0:
            width = grad.shape[2] if piece.snapshot is not None else grad.shape[1] * grad.shape[2]
            lane_bits = choose_lane_bits(width)
            run_gpu(kernels.spread_slices_gpu, grid_of(piece.num_slices, lane_bits), scaled.view(-1),
                    *_arrays(piece, column, grad), low, grad.shape[1], grad.shape[2], lane_bits,
                    out.view(-1))  # fmt: skip
    return out


def multiply_slices(x: Tensor, piece: SlicedCSR, low: int = 0, deterministic: bool | None = None) -> Tensor:
    """W x for `[N, S', F]` of snapshots from `low` on, slice by slice, or with `deterministic` (None asks torch) those
    of a target one after the other.

    Edges weigh what `piece` says, without factors. Slices of snapshots that `x` does not hold may have any number of
    edges and bring nothing.
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
    """Arguments of the kernels that describe a structure; empty arrays for what it lacks."""
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
