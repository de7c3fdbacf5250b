"""HeteroConv and models of `to_hetero` over sorted edges: the sums of all relations of a layer in one launch, instead
of one each.

Rows of all types stand one behind the other, and so do the targets of all relations; edges of a batch are joined once
for the layers that share them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import accumulate
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import HeteroConv, conv
from torch_geometric.nn.conv.hetero_conv import group

from pyg_direct.nn import root
from pyg_direct.nn.propagate import find_reduce, is_plain, wins_on_cpu
from pyg_direct.nn.sorted import SortedBatch, find_batch
from pyg_direct.nn.trimmed import has_hooks
from pyg_direct.nn.typed_layer import Matrices, TypedEdges, convolve_relations
from pyg_direct.ops.aggregate import DTYPES, Transposed, check_edges
from pyg_direct.ops.launch import runs_on_gpu
from pyg_direct.ops.offsets import compress

# Matrices of a class, that of the sums and that of a target's own row.
_MATRICES: dict[type, tuple[str, str]] = {conv.SAGEConv: ("lin_l", "lin_r"), conv.GraphConv: ("lin_rel", "lin_root")}


class _Relation(NamedTuple):
    """A convolution of a layer, and what it is given."""

    conv: Any
    matrices: tuple[Any, Any]
    batch: SortedBatch
    edge_index: Tensor
    sources: Tensor
    own: Tensor


class _Joined(NamedTuple):
    """Edges of all relations, sorted by relation, then target."""

    indptr: Tensor
    row: Tensor
    target: Tensor


def forward(self: Any, *args_dict: Any, **kwargs_dict: Any) -> Any:
    """What replaces `forward` of a HeteroConv in an accelerated model."""
    out = None
    if len(args_dict) == 2 and not kwargs_dict and not torch.compiler.is_compiling():
        x_dict, edge_index_dict = args_dict
        kinds = [kind for kind in self.convs.keys() if kind in edge_index_dict]  # noqa: SIM118
        groups: dict[str, list[int]] = {}
        for number, kind in enumerate(kinds):
            groups.setdefault(kind[-1], []).append(number)
        relations = _read(
            [(self.convs[kind], (x_dict.get(kind[0]), x_dict.get(kind[-1])), edge_index_dict[kind]) for kind in kinds]
        )
        if relations is not None:
            out = _convolve_groups(relations, groups, self.aggr)
    return type(self).forward(self, *args_dict, **kwargs_dict) if out is None else out


def _convolve_groups(relations: list[_Relation], groups: dict[str, list[int]], aggr: str | None
                     ) -> dict[str, Tensor] | None:  # fmt: skip
    """Rows of each target type, of the results of the relations into it."""
    if aggr in ("sum", "mean") and not any(getattr(relation.conv, "normalize", False) for relation in relations):
        outs = _convolve(relations, list(groups.values()))
        if outs is None:
            return None
        return {kind: out / len(groups[kind]) if aggr == "mean" and len(groups[kind]) > 1 else out
                for kind, out in zip(groups, outs, strict=True)}  # fmt: skip
    outs = _convolve(relations, [[number] for number in range(len(relations))])
    return None if outs is None else {kind: group([outs[i] for i in numbers], aggr) for kind, numbers in groups.items()}


def convolve_together(calls: Sequence[tuple[Any, tuple[Any, Any], Any]]) -> list[Tensor] | None:
    """What convolutions of a layer return, in one launch.

    Args:
        calls: (convolution, (rows of its sources, rows of its targets), edges).

    Returns:
        Rows of the targets of each; None unless all of them sum alike, over rows of one width.
    """
    relations = _read(calls)
    return None if relations is None else _convolve(relations, [[number] for number in range(len(relations))])


def _read(calls: Sequence[tuple[Any, tuple[Any, Any], Any]]) -> list[_Relation] | None:
    """What each convolution is given; None unless all of them sum alike."""
    found: list[_Relation] = []
    first: Any = None
    for module, (x, own), edge_index in calls:
        names = _MATRICES.get(type(module))
        if (
            names is None
            or not isinstance(x, Tensor)
            or not isinstance(own, Tensor)
            or not is_accelerated(module)
            or not is_plain(module, edge_index)
            or x.dim() != 2
            or own.dim() != 2
            or x.device != edge_index.device
        ):
            return None
        first = (module, x) if first is None else first
        matrices = getattr(module, names[0]), getattr(module, names[1])
        batch = find_batch(edge_index)
        if (
            batch is None
            or not batch.fits(edge_index, x.shape[0], own.shape[0])
            or not root._are_matrices(*matrices, (x, own))
            or (x.shape[1], x.dtype, find_reduce(module)) != (first[1].shape[1], first[1].dtype, find_reduce(first[0]))
        ):
            return None
        found.append(_Relation(module, matrices, batch, edge_index, x, own))
    # The sums of one relation take one launch anyway.
    return found if len(found) > 1 else None


def is_accelerated(module: Any) -> bool:
    """Whether a convolution is one of ours that nothing looks at, and does nothing before its sum."""
    return (
        getattr(module.__dict__.get("forward"), "__func__", None) is root.forward
        and not has_hooks(module)
        and getattr(module, "root_weight", True)
        and not getattr(module, "project", False)
    )


def _convolve(relations: list[_Relation], groups: list[list[int]]) -> list[Tensor] | None:
    """Results of relations, added up by group; None where PyG's own code is to run."""
    # By identity: relations of one type are given one tensor.
    tables = list({id(relation.sources): relation.sources for relation in relations}.values())
    rows, reduce, num_sources = tables[0], find_reduce(relations[0].conv), len(tables)
    tracked = torch.is_grad_enabled() and any(table.requires_grad for table in tables)
    if rows.dtype not in DTYPES or reduce not in ("sum", "mean"):
        return None
    if not runs_on_gpu(rows) and not wins_on_cpu(rows, reduce, tracked):
        return None
    begins = list(accumulate((len(table) for table in tables), initial=0))
    place_of = {id(table): place for place, table in enumerate(tables)}
    starts = [begins[place_of[id(relation.sources)]] for relation in relations]
    sizes = [relation.own.shape[0] for relation in relations]
    for relation in relations:
        if place_of.setdefault(id(relation.own), len(tables)) == len(tables):
            tables.append(relation.own)
    batch = relations[0].batch
    # Batches tell their edges from others that came to the same memory, and must not keep each other alive.
    key = (
        "joined",
        begins[-1],
        *(
            (weakref.ref(r.batch), r.edge_index.shape[1], start, r.own.shape[0])
            for r, start in zip(relations, starts, strict=True)
        ),
    )
    joined: _Joined = batch.remember(key, lambda: _join(relations, starts, sizes, begins[-1]))
    transposed = None
    if tracked and (torch.are_deterministic_algorithms_enabled() or not runs_on_gpu(rows)):
        transposed = batch.remember(("by source", *key),
                                    lambda: Transposed.of(joined.row, joined.target, begins[-1]))  # fmt: skip
    degrees = [relation.batch.max_degree for relation in relations]
    edges = TypedEdges(*joined, sizes, [place_of[id(relation.own)] for relation in relations], num_sources, groups,
                       None if None in degrees else max(d for d in degrees if d is not None))  # fmt: skip
    matrices = [Matrices(r.matrices[0].weight, r.matrices[0].bias, r.matrices[1].weight) for r in relations]
    outs = convolve_relations(tables, matrices, edges, reduce=reduce, transposed=transposed)
    return [F.normalize(out, p=2.0, dim=-1) if getattr(relations[group[0]].conv, "normalize", False) else out
            for out, group in zip(outs, groups, strict=True)]  # fmt: skip


def _join(relations: Sequence[_Relation], starts: Sequence[int], sizes: Sequence[int], num_sources: int) -> _Joined:
    """The edges of relations, whose sources begin at `starts` among so many and whose targets take `sizes`."""
    rows, targets = zip(*(relation.edge_index.unbind(0) for relation in relations), strict=True)
    ends = list(accumulate(sizes, initial=0))
    row = torch.cat(torch._foreach_add(rows, list(starts)))
    target = torch.cat(torch._foreach_add(targets, ends[:-1]))
    joined = _Joined(compress(target, ends[-1]), row, target)
    if not runs_on_gpu(row):
        # A GPU is not waited for.
        check_edges(joined.indptr, row, num_sources, ends[-1])
    return joined


def watch_relations(module: torch.nn.Module) -> None:
    """Let a HeteroConv sum its relations in one launch where its convolutions allow it."""
    if type(module) is HeteroConv and "forward" not in module.__dict__:
        module.__dict__["forward"] = MethodType(forward, module)


def forget_relations(module: torch.nn.Module) -> None:
    """The opposite of `watch_relations`."""
    if getattr(module.__dict__.get("forward"), "__func__", None) is forward:
        del module.__dict__["forward"]
