"""RGCNConv over sorted edges: all relations in one sum, and in one matrix where most targets have edges of each."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch_geometric
from torch import Tensor
from torch_geometric.nn import aggr

from pyg_direct.nn.propagate import find_reduce, is_plain
from pyg_direct.nn.segments import Segments, are_few, convolve_segments, part_by_relation
from pyg_direct.nn.sorted import SortedEdges, find_batch
from pyg_direct.ops.aggregate import DTYPES, aggregate
from pyg_direct.ops.launch import is_recorded
from pyg_direct.ops.offsets import compress

# Items of the sums of all relations, above which they are left to PyG, relation after relation.
_MOST_ITEMS = 1 << 30


class _Parted(NamedTuple):
    """Edges sorted by target, then relation: offsets of (target, relation), and their ends.

    Attributes:
        given: The relations that edges were told to have; held so that no other tensor gets their address.
        most: Edges of the relation that has most, where PyG looks at that; else 0.
    """

    indptr: Tensor
    row: Tensor
    target: Tensor
    given: Tensor
    most: int


class _Stray(NamedTuple):
    """Relations that edges were told to have, one of which is none; held likewise."""

    given: Tensor


def forward(self: Any, x: Any, edge_index: Any, edge_type: Any = None) -> Tensor:
    """What replaces `forward` of an accelerated RGCNConv."""
    out = None
    if not is_recorded() and is_plain(self, edge_index) and isinstance(edge_type, Tensor):
        pair = x if isinstance(x, tuple) else (x, x)
        if all(isinstance(part, Tensor) and part.dim() == 2 and part.dtype in DTYPES for part in pair):
            out = _convolve(self, pair[0], pair[1], edge_index, edge_type)
    return type(self).forward(self, x, edge_index, edge_type) if out is None else out


def _convolve(self: Any, x: Tensor, own: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor | None:
    batch, relations, num_targets = find_batch(edge_index), self.num_relations, own.shape[0]
    if (
        batch is None
        or edge_type.shape != edge_index.shape[1:]
        or edge_type.dtype not in (torch.int32, torch.int64)
        or not batch.fits(edge_index, x.shape[0], num_targets)
        or x.dtype != self.weight.dtype
    ):
        return None
    edges = batch.view(edge_index)
    few = are_few(edges.row, num_targets, relations, x.shape[1])
    if not few and num_targets * relations * x.shape[1] > _MOST_ITEMS:
        return None

    def part() -> _Parted | Segments | _Stray:
        made = (part_by_relation if few else _part)(edges, edge_type, num_targets, relations)
        return _Stray(edge_type) if made is None else made

    if edge_type.is_inference():
        # Writes to such a tensor leave no trace.
        parted = part()
    else:
        key = "relations", edge_type.data_ptr(), edge_type._version, edge_type.stride(), edges.row.numel(), num_targets
        parted = batch.remember((*key, relations, few), part)
    if isinstance(parted, _Stray):
        return None
    if type(self.aggr_module) is not aggr.SumAggregation and _takes_segments(self, parted):
        return None
    weight, reduce = self.weight, find_reduce(self)
    if self.num_bases is not None:
        weight = (self.comp @ weight.view(self.num_bases, -1)).view(relations, x.shape[1], self.out_channels)
    if isinstance(parted, Segments):
        out = convolve_segments(x, weight, parted, num_targets, reduce=reduce, num_blocks=self.num_blocks,
                                max_degree=edges.max_degree)  # fmt: skip
    else:
        sums = aggregate(x, parted.indptr, parted.row, reduce=reduce, target=parted.target,
                         max_degree=edges.max_degree)  # fmt: skip
        if self.num_blocks is not None:
            parts = sums.view(num_targets, relations, self.num_blocks, sums.shape[1] // self.num_blocks)
            out = torch.einsum("trbi,rbio->tbo", parts, weight).reshape(num_targets, self.out_channels)
        else:
            out = sums.view(num_targets, relations * sums.shape[1]) @ weight.reshape(-1, self.out_channels)
    # PyG adds relations up from zeros of torch's dtype on, which is wider than bfloat16.
    out = out.to(torch.promote_types(out.dtype, torch.get_default_dtype()))
    if self.root is not None:
        at_once = out.dtype == own.dtype and not torch.is_autocast_enabled(own.device.type)
        out = torch.addmm(out, own, self.root) if at_once else out + own @ self.root
    return out if self.bias is None else out + self.bias


def _takes_segments(self: Any, parted: _Parted | Segments) -> bool:
    """Whether PyG multiplies segments by pyg-lib, and so takes means and maxima over all relations together."""
    if not torch_geometric.typing.WITH_SEGMM or self.num_bases is not None or self.num_blocks is not None:
        return False
    asked: bool | None = torch_geometric.backend.use_segment_matmul
    if asked is not None:
        return asked
    return torch_geometric.backend.use_segment_matmul_heuristic(self.num_relations, parted.most, *self.weight.shape[1:])


def _part(edges: SortedEdges, edge_type: Tensor, num_targets: int, relations: int) -> _Parted | None:
    """The edges by target and relation; None if a relation lies outside, which waits for the device once."""
    if edge_type.numel() and bool(((edge_type < 0) | (edge_type >= relations)).any()):
        return None
    most = int(torch.bincount(edge_type).max()) if torch_geometric.typing.WITH_SEGMM and edge_type.numel() else 0
    place, order = torch.sort(edges.target * relations + edge_type, stable=True)
    return _Parted(compress(place, num_targets * relations), edges.row.index_select(0, order), place, edge_type,
                   most)  # fmt: skip
