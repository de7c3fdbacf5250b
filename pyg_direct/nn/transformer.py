"""HGTConv over sorted edges: products, softmax and weighted sum of all relations, which PyG joins, at once."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pyg_direct.nn.propagate import DTYPES, is_plain
from pyg_direct.nn.sorted import find_batch
from pyg_direct.ops.aggregate import aggregate
from pyg_direct.ops.dot import dot
from pyg_direct.ops.offsets import compress
from pyg_direct.ops.softmax import softmax

# What `forward` tells `propagate`, which is given edges that PyG has joined: the bound of the edges of a target.
_TOLD = "_most_edges"
_UNKNOWN = -1


def forward(self: Any, x_dict: Any, edge_index_dict: Any) -> Any:
    """What replaces `forward` of an accelerated HGTConv: PyG's own, once it is known that no edge leads astray."""
    most = None if torch.compiler.is_compiling() else _count_most(self, x_dict, edge_index_dict)
    if most is None:
        return type(self).forward(self, x_dict, edge_index_dict)
    self.__dict__[_TOLD] = most
    try:
        return type(self).forward(self, x_dict, edge_index_dict)
    finally:
        del self.__dict__[_TOLD]


def _count_most(self: Any, x_dict: Any, edge_index_dict: Any) -> int | None:
    """Upper bound of the edges of a target, -1 if there is none; None unless all edges are known to fit."""
    most = 0
    for (src, _, dst), edge_index in edge_index_dict.items():
        batch = find_batch(edge_index) if is_plain(self, edge_index) else None
        if batch is None or not batch.fits(edge_index, x_dict[src].shape[0], x_dict[dst].shape[0]):
            return None
        most = _UNKNOWN if batch.max_degree is None or most == _UNKNOWN else most + batch.max_degree
    return most


def _construct_src_node_feat(self: Any, k_dict: Any, v_dict: Any, edge_index_dict: Any) -> Any:
    """What replaces the method of an accelerated HGTConv: keys and values of the sources of each relation times its
    matrices, by one product a relation. PyG multiplies slices that it finds by a list of types, which it makes on the
    CPU, with a number for each row and head.
    """
    numbers = [self.edge_types_map[kind] for kind in edge_index_dict]
    # Of relations in another order PyG takes other matrices.
    if self.__dict__.get(_TOLD) is None or not numbers or numbers != sorted(numbers) or self.k_rel.bias is not None:
        return type(self)._construct_src_node_feat(self, k_dict, v_dict, edge_index_dict)
    heads, width = self.heads, self.out_channels // self.heads
    # Apart for relations, so that their gradients are put together once.
    weights = torch.cat([part.weight.view(heads, -1, width, width) for part in (self.k_rel, self.v_rel)]).unbind(1)
    offsets, made, begin = {}, [], 0
    for kind, number in zip(edge_index_dict, numbers, strict=True):
        rows = torch.cat([k_dict[kind[0]], v_dict[kind[0]]], dim=1)
        made.append(torch.bmm(rows.transpose(0, 1), weights[number]))
        offsets[kind], begin = begin, begin + rows.shape[0]
    k, v = torch.cat(made, dim=1).transpose(0, 1).split(heads, dim=1)
    return k, v, offsets


def propagate(self: Any, edge_index: Tensor, size: Any = None, **kwargs: Any) -> Tensor:
    """What replaces `propagate` of an accelerated HGTConv."""
    (k, q, v), most = (kwargs[name] for name in "kqv"), self.__dict__.get(_TOLD)
    if most is None or k.dtype not in DTYPES or not k.dtype == q.dtype == v.dtype:
        return type(self).propagate(self, edge_index, size=size, **kwargs)  # type: ignore[no-any-return]
    # Edges come relation after relation.
    target, edge = torch.sort(edge_index[1], stable=True)
    row, indptr = edge_index[0].index_select(0, edge), compress(target, q.shape[0])
    bound = None if most == _UNKNOWN else most
    scores = dot(k, q, indptr, row, target, max_degree=bound)
    scores = scores * kwargs["edge_attr"].index_select(0, edge) / math.sqrt(q.shape[-1])
    work = torch.promote_types(scores.dtype, torch.float32)
    alpha = softmax(None, None, scores.to(work), indptr, row, num_targets=q.shape[0], max_degree=bound)
    dtype = torch.promote_types(v.dtype, scores.dtype)
    out = aggregate(v.to(dtype), indptr, row, weight=alpha.to(dtype), target=target, num_targets=q.shape[0],
                    max_degree=bound)  # fmt: skip
    return out.view(q.shape[0], self.out_channels)
