"""Edges of several snapshots in one structure (PiPAD, section 4.1): their union, and sliced CSR.

The union of consecutive snapshots has a bit for each snapshot. Both forms of a group of snapshots follow from it: the
overlap with the exclusive edges of each snapshot, or the union under a mask. Unions nest, so that the unions of 2, 4
and 8 snapshots are made one after the other.

Sliced CSR has edges by target, each row cut into slices of at most 32. Rows without edges take no room, and work is
balanced because a slice is bounded. A slice belongs to one row. If the edges of several snapshots lie in one structure,
it also belongs to one snapshot.

`sum_scaled` sums over `CSR`, with rows scaled before and after in one pass.

`Arrays` is the base of structures made of several tensors: their bytes, and copies of them on other devices.

For sending, a structure is in few bytes (`PackedCSR`): edge counts of each row instead of slices, sources in as many
bytes as nodes need. Slices follow from the number of edges of each row, and only weights other than one are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from pyg_direct.compiler.jit import THREADS
from pyg_direct.errors import ArgumentError
from pyg_direct.kernels.aggregate.sum import LONG_ROW
from pyg_direct.kernels.snapshots import sliced_csr as kernels
from pyg_direct.kernels.snapshots.sliced_csr import SLICE
from pyg_direct.ops.aggregate.operators import LongRows, length_of_run
from pyg_direct.ops.local_ids.build_csr import compress_ids, repeat_each
from pyg_direct.ops.run_kernel import cpu_chunks, full_grid, run_cpu, run_gpu, threads_for

MAX_GROUP = 8
_KEYS_PER_BLOCK = 2**14
# Keys that one thread merges in the time of an item of other loops.
_KEYS_FOR_AN_ITEM = 8


class EdgeUnion(NamedTuple):
    """Edges of up to eight snapshots.

    Attributes:
        keys: target * N + source of each edge, int64 `[U]`, ascending.
        presence: Bit t is set if snapshot t has the edge, uint8 `[U]`.
    """

    keys: Tensor
    presence: Tensor
    num_snapshots: int

    @classmethod
    def of(cls, keys: Tensor) -> EdgeUnion:
        """Make the union of one snapshot with these edges, ascending and unique."""
        return cls(keys, torch.ones(keys.numel(), dtype=torch.uint8, device=keys.device), 1)

    @property
    def full(self) -> int:
        """Return the presence of an edge that all snapshots have."""
        return (1 << self.num_snapshots) - 1

    def has(self, snapshot: int) -> Tensor:
        """Return the edges that a snapshot has as a mask, bool `[U]`."""
        return (self.presence >> snapshot & 1).bool()


def merge_unions(first: EdgeUnion, second: EdgeUnion) -> EdgeUnion:
    """Merge the unions of two groups of snapshots; the snapshots of `second` follow those in `first`."""
    total = first.num_snapshots + second.num_snapshots
    if total > MAX_GROUP:
        raise ArgumentError(f"a group must have at most {MAX_GROUP} snapshots, got {total}")
    if first.keys.is_cuda:
        keys, place = torch.unique(torch.cat([first.keys, second.keys]), return_inverse=True)
        # Keys of a list are unique, so adding bits equals setting them.
        bits = torch.cat([first.presence, second.presence << first.num_snapshots])
        presence = torch.zeros(keys.numel(), dtype=torch.uint8, device=keys.device).index_add_(0, place, bits)
        return EdgeUnion(keys, presence, total)
    most = max(first.keys.numel(), second.keys.numel())
    with threads_for(most // _KEYS_FOR_AN_ITEM):
        sizes = torch.empty(max(1, min(4 * cpu_chunks(), most // _KEYS_PER_BLOCK)), dtype=torch.int64, device="cpu")
        run_cpu(kernels.count_union_cpu, first.keys, second.keys, sizes)
        begins = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        num_keys = int(begins[-1])
        keys, presence = (torch.empty(num_keys, dtype=dtype, device="cpu") for dtype in (torch.int64, torch.uint8))
        run_cpu(kernels.merge_union_cpu, first.keys, first.presence, second.keys, second.presence, first.num_snapshots,
                begins, keys, presence)  # fmt: skip
    return EdgeUnion(keys, presence, total)


def unite(snapshots: Sequence[Tensor]) -> EdgeUnion:
    """Return the union of consecutive snapshots.

    Args:
        snapshots: Keys target * N + source of each of 1 to 8 snapshots, int64, ascending and unique, on one device.
    """
    if not 1 <= len(snapshots) <= MAX_GROUP:
        raise ArgumentError(f"snapshots must be 1 to {MAX_GROUP} lists of edges, got {len(snapshots)}")
    unions = [EdgeUnion.of(keys) for keys in snapshots]
    while len(unions) > 1:
        pairs = [merge_unions(*unions[i : i + 2]) for i in range(0, len(unions) - 1, 2)]
        unions = pairs + unions[2 * len(pairs) :]
    return unions[0]


_Self = TypeVar("_Self", bound="Arrays")


class Arrays:
    """Base of dataclasses with tensors among their fields."""

    def list_arrays(self) -> dict[str, Tensor]:
        """Return the tensors, by field."""
        values = {field.name: getattr(self, field.name) for field in fields(cast(Any, self))}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    @property
    def num_bytes(self) -> int:
        """Memory of all arrays."""
        return sum(t.numel() * t.element_size() for t in self.list_arrays().values())

    def copy_arrays(self: _Self, copy: Callable[[Tensor], Tensor]) -> _Self:
        """Return the structure with copies of all tensors."""
        return cast(_Self, replace(cast(Any, self), **{n: copy(tensor) for n, tensor in self.list_arrays().items()}))


# Bit 31 of a slice's row: the row has more than one slice.
_SEVERAL = -(2**31)
# Numbers of a row that a thread reads at once.
_NUMBERS_AT_ONCE, _NO_SLICES = 4, 2**31 - 1
# Numbers of a row of a snapshot from which its factor is read for every edge. Narrower rows are scaled before. Four
# snapshots on an H200 take 1.06 ms instead of 1.19 with 16 numbers, and 4.31 instead of 4.02 with 64.
_SCALED_HERE = 64


class CSR(NamedTuple):
    """Edges by target.

    Attributes:
        indptr: Offsets, int32 `[T + 1]`.
        row: Source of each edge, int32 `[E]`.
        shift: From this bit of `row` on, a bit for each snapshot that has an edge; 0 if all have all edges.
    """

    indptr: Tensor
    row: Tensor
    long_rows: LongRows
    shift: int = 0

    def list_arrays(self) -> tuple[Tensor, ...]:
        """Return all arrays."""
        return self.indptr, self.row, *self.long_rows

    @classmethod
    def of(cls, indptr: Tensor, row: Tensor, sizes: tuple[int, int] | None = None, shift: int = 0) -> CSR:
        """List the long rows on the device; `sizes` are the most long rows and slices."""
        return cls(indptr, row, LongRows.of(indptr, row.numel(), indptr.numel() - 1, -1, sizes), shift)


def scales_here(channels: int) -> bool:
    """Report whether `column` is faster than multiplying it into rows of `channels` numbers before."""
    return channels >= _SCALED_HERE and channels % _NUMBERS_AT_ONCE == 0


def sum_scaled(x: Tensor, csr: CSR, weight: Tensor | None, low: int, column: Tensor | None, scale: Tensor | None,
               own: Tensor, diagonal: Tensor | None, out: Tensor | None = None) -> Tensor:  # fmt: skip
    """Return `[T, S, F]` on a GPU: the sums, or `out` with them added.

    Args:
        x: fp32 `[T, S, F]`, contiguous and aligned to 16 bytes; S * F a multiple of 4.
        csr: Edges between the same rows; if it marks the snapshots that have them, `low` is the first of `x`.
        weight: fp32 `[E, 1]`, or `[E, S']` of a group whose snapshot `low` is the first of `x`, if F is a multiple of
            4; None for ones.
        low: First snapshot of `x` in the group.
        column: Factors of sources, fp32 `[T, S]`, if F is a multiple of 4; None for ones.
        scale: Factors of sums, fp32 `[T, S]`; None for ones.
        own: Rows as `x` (or `x`) that are multiplied by `diagonal` and added to each target.
        diagonal: fp32 `[T, S]`; None for zeros, and if there is an `out`.
        out: Tensor to add to, `[T, S, F]`.
    """
    num_targets, size, channels = x.shape
    assert out is None or diagonal is None, "the diagonal is part of what is there"
    adds = int(out is not None)
    out = torch.empty_like(x) if out is None else out
    num_edges, pieces = csr.row.numel(), size * channels // _NUMBERS_AT_ONCE
    long_rows = csr.long_rows
    partials = long_rows.make_partials(size * channels, torch.float32)
    run = length_of_run(num_targets * pieces, x)
    num_runs = -(-num_targets // run)
    num_weights = 0 if weight is None else weight.shape[1]
    first = low if num_weights > 1 else 0
    helpers = min(long_rows.capacity, -(-full_grid(x) * THREADS // pieces))
    blocks = -(-(num_runs + helpers) * pieces // THREADS)
    run_gpu(kernels.sum_scaled_rows_gpu, max(1, blocks), x.data_ptr(), csr.indptr, csr.indptr.data_ptr(),
            csr.row.data_ptr(), address_of(weight) + 4 * first, num_weights, address_of(column), address_of(scale),
            own.data_ptr(), address_of(diagonal), csr.shift, low, num_edges, num_targets, num_runs, run, size, channels,
            pieces, LONG_ROW if helpers else _NO_SLICES, adds, long_rows.slices, long_rows.counts, helpers,
            partials.data_ptr(), out.data_ptr())  # fmt: skip
    if helpers:
        none = x.new_empty(0)
        run_gpu(kernels.add_scaled_slices_gpu, long_rows.grid_of_hubs(), own.view(-1), csr.indptr,
                none if scale is None else scale.view(-1), none if diagonal is None else diagonal.view(-1),
                num_edges, size, channels, adds, long_rows.hubs, long_rows.counts, partials, out.view(-1))  # fmt: skip
    return out


def address_of(tensor: Tensor | None) -> int:
    """Return the address of a tensor's first number; 0 for None."""
    return 0 if tensor is None or tensor.numel() == 0 else tensor.data_ptr()


_MOST = 2**31


@dataclass(frozen=True, eq=False)
class SlicedCSR(Arrays):
    """Edges of one graph, or of a group of snapshots, in slices.

    Attributes:
        rows: Target of each slice, int32 `[slices]`; ascending except for bit 31. That bit is set (the number is
            negative) if the target, or the target in that snapshot, has several slices.
        offsets: First edge of each slice and, at the end, the number of edges, int32 `[slices + 1]`.
        cols: Source of each edge, int32 `[nnz]`.
        num_snapshots: S, the snapshots of the group.
        weight: fp32 or float64 `[nnz, 1]`, one weight an edge in all snapshots, or `[nnz, S]`; None for ones.
        snapshot: Snapshot that a slice belongs to, uint8 `[slices]`; None if slices belong to all.
        presence: Snapshots in which an edge is present, one bit each, uint8 `[nnz]`; None if it is in all.
        long_rows: Number of long rows (of a snapshot, if slices belong to snapshots), and of slices that `LongRows`
            cuts them into; None if they were not counted.
    """

    rows: Tensor
    offsets: Tensor
    cols: Tensor
    num_rows: int
    num_snapshots: int = 1
    weight: Tensor | None = None
    snapshot: Tensor | None = None
    presence: Tensor | None = None
    long_rows: tuple[int, int] | None = None

    @property
    def num_bytes(self) -> int:
        """Memory of all arrays, and of the arrays that `csr` made beside them."""
        made: CSR | None = self.__dict__.get("csr")
        beside = () if made is None else (array for array in made.list_arrays() if array is not self.cols)
        return super().num_bytes + sum(array.numel() * array.element_size() for array in beside)

    @property
    def num_slices(self) -> int:
        """Number of slices."""
        return self.rows.numel()

    @property
    def num_edges(self) -> int:
        """Number of edges held; exclusive edges once for each of their snapshots, others once."""
        return self.cols.numel()

    def to(self, device: torch.device, non_blocking: bool = False) -> SlicedCSR:
        """Copy to a device; return self if it is there."""
        if self.cols.device == device:
            return self
        return self.copy_arrays(lambda t: t.to(device, non_blocking=non_blocking))

    def expand_rows(self) -> Tensor:
        """Return the target of each edge, int64 `[nnz]`."""
        return self._of_edges(self.rows.long() & (_MOST - 1))

    def _of_edges(self, of_slices: Tensor) -> Tensor:
        return repeat_each(of_slices, self.offsets.diff(), self.num_edges)

    def list_owners(self) -> Tensor | None:
        """Return the snapshot that each edge belongs to, `[nnz]`; None if edges belong to all."""
        return None if self.snapshot is None else self._of_edges(self.snapshot)

    def segments(self) -> Tensor:
        """Return the target of each slice, or target * S + snapshot if slices belong to snapshots, int64 `[slices]`."""
        rows = self.rows.long() & (_MOST - 1)
        return rows if self.snapshot is None else rows * self.num_snapshots + self.snapshot

    def to_csr(self) -> tuple[Tensor, Tensor]:
        """Return offsets int32 `[N + 1]` and sources int32 `[nnz]`; node i of snapshot t is i * S + t."""
        rows, count, cols = self.rows & (_MOST - 1), self.num_rows, self.cols
        if self.snapshot is not None:
            count *= self.num_snapshots
            rows = rows * self.num_snapshots + self.snapshot
            cols = cols * self.num_snapshots + self._of_edges(self.snapshot)
        return self.offsets.index_select(0, compress_ids(rows, count)), cols

    @cached_property
    def csr(self) -> CSR:
        """Return `to_csr` on a GPU, cached; uppermost bits of sources mark snapshots, if some lack edges."""
        indptr, cols = self.to_csr()
        if self.presence is None:
            return CSR.of(indptr, cols, self.long_rows)
        shift = 32 - self.num_snapshots
        return CSR.of(indptr, torch.add(cols, self.presence, alpha=1 << shift), self.long_rows, shift)

    @cached_property
    def loop_arrays(self) -> tuple[Any, ...]:
        """Return the arguments of CPU loops, in their order, made once; empty arrays for missing ones."""
        none, weight = torch.empty(0, dtype=torch.uint8, device="cpu"), self.weight
        others = (none if array is None else array for array in (self.snapshot, self.presence))
        weights, each = (torch.empty(0, device="cpu"), 0) if weight is None else (weight.reshape(-1), weight.shape[1])
        return (*(a.numpy() for a in (self.rows, self.offsets, self.cols, weights)), each, *(a.numpy() for a in others))

    def transpose(self) -> SlicedCSR:
        """Return the same edges with sources and targets exchanged."""
        rows, cols = self.cols.long(), self.expand_rows()
        snapshot = None if self.snapshot is None else self._of_edges(self.snapshot)
        segments = rows if snapshot is None else rows * self.num_snapshots + snapshot
        # Edges come by target, so a stable sort leaves the edges of a source ascending.
        segments, order = torch.sort(segments, stable=True)
        return _cut(
            segments,
            cols.index_select(0, order).int(),
            self.num_rows,
            self.num_snapshots,
            None if self.weight is None else self.weight.index_select(0, order),
            snapshot is not None,
            None if self.presence is None else self.presence.index_select(0, order),
        )

    def equals(self, other: SlicedCSR) -> bool:
        """Report whether both hold the same edges in the same order; waits for their device."""
        mine, theirs = self.list_arrays(), other.list_arrays()
        return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def _cut(segments: Tensor, cols: Tensor, num_rows: int, num_snapshots: int, weight: Tensor | None = None,
         by_snapshot: bool = False, presence: Tensor | None = None) -> SlicedCSR:  # fmt: skip
    """Cut ascending segments into slices: rows, or with `by_snapshot` row * S + snapshot."""
    if max(num_rows, cols.numel()) >= _MOST:
        raise ArgumentError(f"a structure must have less than 2**31 rows and edges, got {num_rows} and {cols.numel()}")
    ids, counts = torch.unique_consecutive(segments, return_counts=True)
    total = int(count_slices(counts).sum())
    return slice_counts(ids, counts, total, cols, num_rows, num_snapshots, weight, by_snapshot, presence,
                        LongRows.measure(counts))  # fmt: skip


def count_slices(counts: Tensor) -> Tensor:
    """Return the slices of segments of so many edges."""
    return (counts + (SLICE - 1)) // SLICE


def place_slices(counts: Tensor, num_slices: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the segment and the first edge of each slice, and True if a segment has several slices, without a wait for
    a GPU.

    Args:
        counts: Edges of each segment, int64 `[R]`.
    """
    of_segments = count_slices(counts)
    segment = repeat_each(torch.arange(counts.numel(), device=counts.device), of_segments, num_slices)
    # The number of a slice within its segment.
    number = torch.arange(num_slices, device=counts.device) - (of_segments.cumsum(0) - of_segments)[segment]
    return segment, (counts.cumsum(0) - counts)[segment] + SLICE * number, of_segments > 1


def flag_rows(rows: Tensor, has_several: Tensor) -> Tensor:
    """Return targets with bit 31 set for rows of several slices, int32."""
    return torch.where(has_several, rows + _SEVERAL, rows).int()


def slice_counts(segments: Tensor, counts: Tensor, num_slices: int, cols: Tensor, num_rows: int, num_snapshots: int,
                 weight: Tensor | None = None, by_snapshot: bool = False, presence: Tensor | None = None,
                 long_rows: tuple[int, int] | None = None) -> SlicedCSR:  # fmt: skip
    """Cut edges that lie segment by segment into slices, without a wait for a GPU.

    Args:
        segments: Rows, or with `by_snapshot` row * S + snapshot, ascending, int64 `[R]`.
        counts: Edges of each segment, int64 `[R]`.
        cols: Source of each edge, int32 `[nnz]`.
        by_snapshot: True if slices belong to snapshots.
    """
    segment, first, has_several = place_slices(counts, num_slices)
    starts = torch.empty(num_slices + 1, dtype=torch.int32, device=cols.device)
    starts[:num_slices] = first
    # A number set at an index would be copied from the host.
    starts[num_slices:].fill_(cols.numel())
    rows, snapshot = segments, None
    if by_snapshot:
        rows, snapshot = segments // num_snapshots, (segments % num_snapshots).to(torch.uint8)[segment]
    flagged = flag_rows(rows, has_several)[segment]
    return SlicedCSR(flagged, starts, cols.contiguous(), num_rows, num_snapshots, weight, snapshot, presence, long_rows)


def slice_keys(keys: Tensor, num_rows: int, weight: Tensor | None = None, presence: Tensor | None = None,
               num_snapshots: int = 1) -> SlicedCSR:  # fmt: skip
    """Cut edges given as ascending keys target * N + source into slices.

    Args:
        keys: int64 `[nnz]`.
        weight: fp32 `[nnz, 1]` or `[nnz, S]`, or None for ones.
        presence: uint8 `[nnz]`, or None if every snapshot has every edge.
    """
    rows = torch.div(keys, max(1, num_rows), rounding_mode="floor")
    return _cut(rows, (keys - rows * num_rows).int(), num_rows, num_snapshots, weight, False, presence)


def slice_apart(keys: Sequence[Tensor], num_rows: int, weight: Tensor | None = None) -> SlicedCSR:
    """Cut several graphs into slices of one graph: node i of graph t is t * N + i.

    Args:
        keys: Ascending keys target * N + source of each graph, int64.
        num_rows: N; its square times the number of graphs must be less than 2**63.
        weight: fp32 `[nnz]` of all of them, or None for ones.
    """
    weight = None if weight is None else weight.unsqueeze(1)
    if len(keys) == 1:
        return slice_keys(keys[0], num_rows, weight)
    joined = torch.cat([part + t * num_rows * num_rows if t else part for t, part in enumerate(keys)])
    rows = torch.div(joined, max(1, num_rows), rounding_mode="floor")
    counts = [part.numel() for part in keys]
    before = torch.tensor([[t * num_rows for t in range(len(keys))], counts], device=joined.device)
    cols = joined - rows * num_rows + repeat_each(before[0], before[1], joined.numel())
    return _cut(rows, cols.int(), len(keys) * num_rows, 1, weight)


def slice_union(union: EdgeUnion, num_rows: int, weight: Tensor | None = None) -> SlicedCSR:
    """Cut the union of a group under its mask into slices, one byte an edge."""
    presence = union.presence if union.num_snapshots > 1 else None
    return slice_keys(union.keys, num_rows, weight, presence, union.num_snapshots)


def slice_exclusives(keys: Tensor, presence: Tensor, num_rows: int, num_snapshots: int,
                     weight: Tensor | None = None) -> SlicedCSR:  # fmt: skip
    """Cut edges of a group that are not shared, each once for every snapshot that has it, into slices of one structure.

    Args:
        keys: Ascending keys, int64 `[E]`.
        presence: Bits of the snapshots that have each edge, uint8 `[E]`.
        weight: fp32 `[E, 1]` or `[E, S]`, or None for ones; the structure holds `[nnz, 1]`.
    """
    bits = torch.arange(num_snapshots, dtype=torch.uint8, device=keys.device)
    edge, snapshot = (presence.unsqueeze(1) >> bits & 1).nonzero(as_tuple=True)
    rows = torch.div(keys, max(1, num_rows), rounding_mode="floor")
    cols = (keys - rows * num_rows).int()
    segments, order = torch.sort(rows[edge] * num_snapshots + snapshot, stable=True)
    edge, snapshot = edge[order], snapshot[order]
    if weight is not None:
        weight = weight[edge, snapshot if weight.shape[1] > 1 else 0].unsqueeze(1)
    return _cut(segments, cols[edge], num_rows, num_snapshots, weight, True)


_BYTE, _TWO_BYTES, _THREE_BYTES = 2**8, 2**16, 2**24


@dataclass(frozen=True, eq=False)
class PackedCSR(Arrays):
    """Packed form of a `SlicedCSR` for sending.

    Attributes:
        counts: Edges of each row, or of each row in each snapshot if slices belong to snapshots, `[R]`. uint8, int16
            that holds the bits of an unsigned number, or int32.
        segments: Rows (row * S + snapshot) that `counts` belong to, ascending, int32 `[R]`; None if all have a count.
        low: Source of each edge, int32 `[nnz]`; or its lower two bytes, int16.
        high: Third byte of each source, uint8 `[nnz]`; None if there is none, or if `low` has all.
        places, values: Positions of weights other than one, int32, and these weights, of their dtype or uint8, `[k]`;
            `places` is None if `values` has all weights.
        weights: Weights of an edge: 0 if all are one, otherwise 1 or S.
        by_snapshot: True if slices belong to snapshots.
    """

    counts: Tensor
    segments: Tensor | None
    low: Tensor
    high: Tensor | None
    places: Tensor | None
    values: Tensor | None
    weights: int
    presence: Tensor | None
    num_rows: int
    num_snapshots: int
    num_slices: int
    by_snapshot: bool
    long_rows: tuple[int, int] | None

    @classmethod
    def of(cls, piece: SlicedCSR) -> PackedCSR:
        """Pack a structure."""
        segments = piece.segments()
        num_segments = piece.num_rows * (1 if piece.snapshot is None else piece.num_snapshots)
        counts = segments.new_zeros(num_segments).index_add_(0, segments, piece.offsets.diff().long())
        counts, listed = _choose_counts(counts)
        low, high = _split(piece.cols, piece.num_rows)
        places, values = _list_weights(piece.weight)
        return cls(counts, listed, low, high, places, values, 0 if piece.weight is None else piece.weight.shape[1],
                   piece.presence, piece.num_rows, piece.num_snapshots, piece.num_slices, piece.snapshot is not None,
                   piece.long_rows)  # fmt: skip

    def unpack(self) -> SlicedCSR:
        """Unpack the structure on the same device, without a wait for a GPU."""
        counts = _widen(self.counts).long()
        segments = self.segments
        segments = torch.arange(counts.numel(), device=counts.device) if segments is None else segments.long()
        cols = _widen(self.low) if self.high is None else _widen(self.low) | self.high.int() << 16
        return slice_counts(segments, counts, self.num_slices, cols, self.num_rows, self.num_snapshots,
                            self._make_weight(cols.numel()), self.by_snapshot, self.presence,
                            self.long_rows)  # fmt: skip

    def _make_weight(self, num_edges: int) -> Tensor | None:
        values = self.values
        if values is not None and values.dtype == torch.uint8:
            values = values.float()
        if values is None or self.places is None:
            return None if values is None else values.view(num_edges, self.weights)
        ones = values.new_ones(num_edges * self.weights)
        return ones.scatter_(0, self.places.long(), values).view(num_edges, self.weights)

    @property
    def num_edges(self) -> int:
        """Number of edges held."""
        return self.low.numel()

    @property
    def device(self) -> torch.device:
        """Device of the arrays."""
        return self.low.device

    @property
    def is_pinned(self) -> bool:
        """Report whether all of its arrays lie in page-locked memory."""
        return all(tensor.numel() == 0 or tensor.is_pinned() for tensor in self.list_arrays().values())

    def to(self, device: torch.device, non_blocking: bool = False) -> PackedCSR:
        """Copy to a device; return self if it is there."""
        return self if self.device == device else self.copy_arrays(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PackedCSR:
        """Return a copy in page-locked memory."""
        return self.copy_arrays(Tensor.pin_memory)

    def record_stream(self, stream: Any) -> None:
        """Keep freed memory until the work that a GPU stream has at that time is done."""
        for tensor in self.list_arrays().values():
            tensor.record_stream(stream)


def _choose_counts(counts: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the counts of all segments, or of non-empty segments with their numbers, whichever takes fewer bytes."""
    packed = _narrow(counts)
    has = counts.nonzero().squeeze(1)
    if has.numel() * (packed.element_size() + 4) >= packed.numel() * packed.element_size():
        return packed, None
    return packed[has], has.int()


def _narrow(numbers: Tensor) -> Tensor:
    """Return numbers in [0, 2**31) in the fewest bytes."""
    most = int(numbers.max()) if numbers.numel() else 0
    if most < _BYTE:
        return numbers.to(torch.uint8)
    return numbers.to(torch.int16) if most < _TWO_BYTES else numbers.int()


def _widen(numbers: Tensor) -> Tensor:
    """Return numbers that `_narrow` made as int32; int16 holds unsigned numbers."""
    return numbers.int() & (_TWO_BYTES - 1) if numbers.dtype == torch.int16 else numbers.int()


def _split(cols: Tensor, num_nodes: int) -> tuple[Tensor, Tensor | None]:
    """Split sources into two bytes and a third, or return them unchanged."""
    if num_nodes > _THREE_BYTES:
        return cols, None
    return cols.to(torch.int16), None if num_nodes <= _TWO_BYTES else (cols >> 16).to(torch.uint8)


def is_whole(weight: Tensor) -> bool:
    """Report whether weights are whole numbers that a byte holds; sums of 2**16 of them are exact in fp32."""
    return torch.equal(weight.to(torch.uint8).to(weight.dtype), weight)


def _list_weights(weight: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return positions and values of weights other than one, or all weights, whichever takes fewer bytes.

    Small whole weights, for example of edges that were given several times, are bytes.
    """
    if weight is None:
        return None, None
    flat = weight.reshape(-1)
    values = flat.to(torch.uint8) if is_whole(flat) else flat
    places = (flat != 1).nonzero().squeeze(1)
    if places.numel() * (values.element_size() + 4) >= values.numel() * values.element_size():
        return None, values
    return places.int(), values[places]
