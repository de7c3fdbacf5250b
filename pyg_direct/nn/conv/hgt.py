"""HGTConv over sorted edges: products, softmax and weighted sum of all relations, which PyG joins, at once."""

from __future__ import annotations

import math
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.nn import conv
from torch_geometric.nn.dense import HeteroLinear

from pyg_direct.nn import paths
from pyg_direct.nn.conv.spec import ConvSpec
from pyg_direct.nn.dispatch import find_obstacle, find_replaced, is_plain
from pyg_direct.nn.hetero.attention import ProductEdges, attend_products, can_attend_products, weigh_values
from pyg_direct.nn.hetero.unread_rows import drop_relations, find_rows_of_pass
from pyg_direct.nn.linear import multiply_heads
from pyg_direct.nn.sorted_edges import SortedBatch, find_batch
from pyg_direct.nn.trimming import has_hooks
from pyg_direct.nn.whole_graphs import find_whole, keeps_graphs
from pyg_direct.ops.aggregate.products import dot
from pyg_direct.ops.aggregate.sum_rows import DTYPES
from pyg_direct.ops.local_ids.build_csr import compress_ids
from pyg_direct.ops.run_kernel import is_recorded

# Knowledge that `forward` passes to `_construct_src_node_feat` and `propagate`, which is given edges that PyG has
# joined.
_TOLD = "_relations"


class _Told:
    """Knowledge of the edges of a call.

    Attributes:
        batch: Batch of the first relation, which remembers results for all of them.
        max_degree: Upper bound of the edges of a target, None if there is none.
        both: Keys and values, `[U, 2 * H, C]`, once keys have been multiplied by the weights of relations and the scale
            of the products; None before.
    """

    def __init__(self, batch: SortedBatch, key: tuple[Any, ...], max_degree: int | None) -> None:
        self.batch, self.key, self.max_degree = batch, key, max_degree
        self.both: Tensor | None = None


def forward(self: Any, x_dict: Any, edge_index_dict: Any) -> Any:
    """Override `forward` of an accelerated HGTConv: PyG's own, once all edges are known to be in bounds."""
    rows = find_rows_of_pass()
    if rows is None:
        return _attend(self, x_dict, edge_index_dict)
    call = rows.begin_call(x_dict.values())
    unused = call.unused
    if unused:
        edge_index_dict = drop_relations(edge_index_dict, unused)
        read = {end for kind in edge_index_dict for end in (kind[0], kind[-1])}
        x_dict = {kind: x for kind, x in x_dict.items() if kind in read or kind not in unused}
    return rows.end_call(call, _attend(self, x_dict, edge_index_dict))


def _attend(self: Any, x_dict: Any, edge_index_dict: Any) -> Any:
    told = None if is_recorded() else _tell(self, x_dict, edge_index_dict)
    if told is None:
        return type(self).forward(self, x_dict, edge_index_dict)
    self.__dict__[_TOLD] = told
    try:
        return type(self).forward(self, x_dict, edge_index_dict)
    finally:
        del self.__dict__[_TOLD]


def _tell(self: Any, x_dict: Any, edge_index_dict: Any) -> _Told | None:
    """Collect the knowledge of the edges; None unless all of them are known to fit."""
    batches, key, most = [], [], 0
    for (src, _, dst), edge_index in edge_index_dict.items():
        sizes = x_dict[src], x_dict[dst]
        batch: SortedBatch | None = None
        if is_plain(self, edge_index):
            batch = find_batch(edge_index)
            if batch is None and keeps_graphs():
                # PyG's code waits for a GPU, so that no pass could be recorded.
                batch = find_whole(edge_index, len(sizes[1]), 0)
        if batch is None or not batch.fits(edge_index, *(rows.shape[0] for rows in sizes)):
            return None
        batches.append(batch)
        # Batches distinguish their edges from others that came to the same memory, and must not keep each other alive.
        key.append((weakref.ref(batch), edge_index.shape[1], dst, *(rows.shape[0] for rows in sizes)))
        most += batch.max_degree or 0
    if not batches:
        return None
    bounded = all(batch.max_degree is not None for batch in batches)
    # Types that no edge leads to take positions among the targets too.
    return _Told(
        batches[0], ("hgt", *key, *((kind, x.shape[0]) for kind, x in x_dict.items())), most if bounded else None
    )


def _construct_src_node_feat(self: Any, k_dict: Any, v_dict: Any, edge_index_dict: Any) -> Any:
    """Override the method of an accelerated HGTConv: keys and values of the sources of each relation times its
    matrices, by one product a relation. PyG multiplies slices that it finds by a list of types. It makes the list on
    the CPU, with a number for each row and head.
    """
    numbers = [self.edge_types_map[kind] for kind in edge_index_dict]
    # For relations in another order PyG takes other matrices.
    told = self.__dict__.get(_TOLD)
    if (told is None or not numbers or numbers != sorted(numbers) or self.k_rel.bias is not None
            or not (_is_plain_matrix(self.k_rel) and _is_plain_matrix(self.v_rel))):  # fmt: skip
        return type(self)._construct_src_node_feat(self, k_dict, v_dict, edge_index_dict)
    heads, width = self.heads, self.out_channels // self.heads
    keys, values = (part.weight.view(heads, -1, width, width) for part in (self.k_rel, self.v_rel))
    if len(numbers) < keys.shape[1]:
        # A list as an index would be copied to a GPU, for which no recording can wait.
        keys, values = (torch.stack([part[:, number] for number in numbers], dim=1) for part in (keys, values))
    # (k W) . q p / sqrt(C) = (k (W p / sqrt(C))) . q, and matrices are fewer than edges.
    scale = torch.cat([self.p_rel["__".join(kind)] for kind in edge_index_dict]).t() / math.sqrt(width)
    # Separately for relations, so that their gradients are concatenated once.
    weights = torch.cat([keys * scale[:, :, None, None], values]).unbind(1)
    offsets, made, begin = {}, [], 0
    for kind, weight in zip(edge_index_dict, weights, strict=True):
        rows = torch.cat([k_dict[kind[0]], v_dict[kind[0]]], dim=1)
        made.append(multiply_heads(rows, weight))
        offsets[kind], begin = begin, begin + rows.shape[0]
    told.both = torch.cat(made, dim=1).transpose(0, 1)
    k, v = told.both.split(heads, dim=1)
    return k, v, offsets


def _is_plain_matrix(module: Any) -> bool:
    """Report whether these are PyG's matrices of relations, without a `forward` or hooks from a program."""
    return type(module) is HeteroLinear and "forward" not in module.__dict__ and not has_hooks(module)


def propagate(self: Any, edge_index: Tensor, size: Any = None, **kwargs: Any) -> Tensor:
    """Override `propagate` of an accelerated HGTConv."""
    (k, q, v), told = (kwargs[name] for name in "kqv"), self.__dict__.get(_TOLD)
    if told is None or k.dtype not in DTYPES or not k.dtype == q.dtype == v.dtype:
        if not is_recorded():
            self._paths.note_left(paths.DTYPE if told is not None else find_obstacle(self) or paths.UNKNOWN)
        return type(self).propagate(self, edge_index, size=size, **kwargs)  # type: ignore[no-any-return]
    self._paths.note()
    num_targets, bound = q.shape[0], told.max_degree
    joined: _Joined = told.batch.remember(told.key, lambda: _sort(edge_index, num_targets))
    edges = ProductEdges(joined.indptr, joined.row, joined.target, len(k), num_targets, bound, told.batch, told.key)
    if told.both is not None:
        both = told.both.flatten(1)
        if can_attend_products(both, self.heads, edges):
            return attend_products(both, q.flatten(1), self.heads, edges)
    scores = dot(k, q, joined.indptr, joined.row, joined.target, max_degree=bound)
    if told.both is None:
        scores = scores * kwargs["edge_attr"].index_select(0, joined.edge) / math.sqrt(q.shape[-1])
    return weigh_values(scores, v, edges).view(num_targets, self.out_channels)


class _Joined(NamedTuple):
    """Edges of all relations, sorted by target; `edge` is the position of each among the edges that PyG has joined."""

    indptr: Tensor
    row: Tensor
    target: Tensor
    edge: Tensor


def _sort(edge_index: Tensor, num_targets: int) -> _Joined:
    # They come relation after relation.
    target, edge = torch.sort(edge_index[1], stable=True)
    return _Joined(compress_ids(target, num_targets), edge_index[0].index_select(0, edge), target, edge)


HGT = ConvSpec(conv.HGTConv, forward, propagate, (_construct_src_node_feat,), find_left=find_replaced)
