"""HeteroConv and models of `to_hetero` over sorted edges: the sums of all relations of a layer that are alike in one
launch, instead of one each.

Rows of all types stand one behind the other, and so do the targets of all relations; edges of a batch are joined once
for the layers that share them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import HeteroConv, conv
from torch_geometric.nn.conv.hetero_conv import group

from pyg_direct.nn import attention, gcn, gin, joined_attention, joined_gcn, joined_gin, joined_gine, root
from pyg_direct.nn.attached import attach, detach, is_attached
from pyg_direct.nn.joined_edges import Relation, Tables, join_edges
from pyg_direct.nn.propagate import find_reduce, is_plain, propagate, wins_on_cpu
from pyg_direct.nn.sorted import find_batch
from pyg_direct.nn.trimmed import has_hooks
from pyg_direct.nn.typed_layer import Matrices, TypedEdges, convolve_relations
from pyg_direct.ops.aggregate import DTYPES
from pyg_direct.ops.launch import is_recorded, runs_on_gpu


class Call(NamedTuple):
    """What a convolution of a relation is called with.

    Attributes:
        conv: The convolution.
        x: Rows as it takes them.
        edge_index: Its edges.
        edge_attr: What belongs to them, where it is told.
    """

    conv: Any
    x: Any
    edge_index: Any
    edge_attr: Any = None

    def make(self) -> Tensor:
        """What it returns."""
        more = {} if self.edge_attr is None else {"edge_attr": self.edge_attr}
        made: Tensor = self.conv(self.x, self.edge_index, **more)
        return made


# Matrices of a class, that of the sums and that of a target's own row.
_MATRICES: dict[type, tuple[str, str]] = {conv.SAGEConv: ("lin_l", "lin_r"), conv.GraphConv: ("lin_rel", "lin_root")}


def forward(self: Any, *args_dict: Any, **kwargs_dict: Any) -> Any:
    """What replaces `forward` of a HeteroConv in an accelerated model."""
    out, attributes = None, kwargs_dict.get("edge_attr_dict", {})
    if len(args_dict) == 2 and kwargs_dict.keys() <= {"edge_attr_dict"} and not is_recorded():
        x_dict, edge_index_dict = args_dict
        kinds = [kind for kind in self.convs.keys() if kind in edge_index_dict]  # noqa: SIM118
        # What has no rows is refused by PyG, which also makes other arguments of what is told by type of node.
        if all(kind[0] in x_dict or kind[-1] in x_dict for kind in kinds) and all(
            isinstance(kind, tuple) and (kind not in self.convs or kind in edge_index_dict) for kind in attributes
        ):
            groups: dict[str, list[int]] = {}
            for number, kind in enumerate(kinds):
                groups.setdefault(kind[-1], []).append(number)
            calls = [Call(self.convs[kind], _rows_of(kind, x_dict), edge_index_dict[kind], attributes.get(kind))
                     for kind in kinds]  # fmt: skip
            out = _convolve_groups(calls, groups, self.aggr)
    return type(self).forward(self, *args_dict, **kwargs_dict) if out is None else out


def _rows_of(kind: Any, x_dict: Any) -> Any:
    """What HeteroConv gives the convolution of a relation."""
    return x_dict[kind[0]] if kind[0] == kind[-1] else (x_dict.get(kind[0]), x_dict.get(kind[-1]))


def _convolve_groups(calls: list[Call], groups: dict[str, list[int]], aggr: str | None) -> dict[str, Tensor] | None:
    """Rows of each target type, of the results of the relations into it; None where each relation is by itself."""
    alike = _find_alike(calls)
    if alike and aggr in ("sum", "mean") and _is_layer(alike, len(calls)):
        outs = _convolve(alike[0].relations, list(groups.values()))
        return {kind: out / len(groups[kind]) if aggr == "mean" and len(groups[kind]) > 1 else out
                for kind, out in zip(groups, outs, strict=True)}  # fmt: skip
    results = _convolve_alike(calls, alike)
    if results is None:
        return None
    return {kind: group([results[i] for i in numbers], aggr) for kind, numbers in groups.items()}


def convolve_together(calls: Sequence[Call]) -> list[Tensor] | None:
    """What convolutions of a layer return, those that are alike in one launch.

    Args:
        calls: That of each relation.

    Returns:
        Rows of the targets of each; None where each is by itself.
    """
    return _convolve_alike(calls, _find_alike(calls))


class _Kind(NamedTuple):
    """How convolutions of a class go together.

    Attributes:
        name, method: What is replaced of an accelerated one, and by what.
        read: What relations must have in common, of (convolution, rows of its sources, rows of its targets), and what
            belongs to edges.
        convolve: Results of relations that have it; None where each is faster by itself.
        finish: What makes of each of them that which the convolution returns.
        takes_attributes: Whether edges have rows.
    """

    name: str
    method: Callable[..., Any]
    read: Callable[..., Hashable]
    convolve: Callable[[Sequence[Relation]], list[Tensor] | None]
    finish: Callable[[Any, Tensor], Tensor] | None = None
    takes_attributes: bool = False


class _Alike(NamedTuple):
    """Relations of one launch, and their places among the calls."""

    kind: _Kind
    numbers: list[int]
    relations: list[Relation]


def _find_alike(calls: Sequence[Call]) -> list[_Alike]:
    """Relations that go together, two or more each: the sums of one take one launch anyway."""
    found: dict[Hashable, _Alike] = {}
    for number, (module, x, edge_index, attribute) in enumerate(calls):
        kind, rows = _KINDS.get(type(module)), x if isinstance(x, tuple) else (x, x)
        if (
            kind is None
            or kind.takes_attributes != isinstance(attribute, Tensor)
            or len(rows) != 2
            or not is_accelerated(module)
            or not is_plain(module, edge_index)
        ):
            continue
        sources, own = rows
        if not (isinstance(sources, Tensor) and isinstance(own, Tensor) and sources.dim() == own.dim() == 2
                and sources.device == own.device == edge_index.device):  # fmt: skip
            continue
        batch = find_batch(edge_index)
        if batch is None or not batch.fits(edge_index, sources.shape[0], own.shape[0]):
            continue
        if kind.takes_attributes and attribute.shape[:1] != edge_index.shape[1:]:
            continue
        common = kind.read(module, sources, own, *([attribute] if kind.takes_attributes else []))
        if common is not None:
            # Classes of one kind sum together.
            alike = found.setdefault((kind, sources.device, common), _Alike(kind, [], []))
            alike.numbers.append(number)
            alike.relations.append(Relation(module, batch, edge_index, sources, own, attribute))
    return [alike for alike in found.values() if len(alike.numbers) > 1]


def _convolve_alike(calls: Sequence[Call], alike: Sequence[_Alike]) -> list[Tensor] | None:
    """Results of all calls, those that are not alike one by one; None if none are alike."""
    if not alike:
        return None
    outs: dict[int, tuple[_Kind, Tensor]] = {}
    for kind, numbers, relations in alike:
        made = kind.convolve(relations)
        if made is not None:
            outs.update((i, (kind, out)) for i, out in zip(numbers, made, strict=True))
    results: list[Tensor] = []
    # In their order, which that of random numbers is.
    for number, call in enumerate(calls):
        if number not in outs:
            results.append(call.make())
            continue
        kind, out = outs[number]
        results.append(out if kind.finish is None else kind.finish(call.conv, out))
    return results


def is_accelerated(module: Any) -> bool:
    """Whether a convolution is one of ours that nothing looks at, and does nothing before its sum."""
    kind = _KINDS.get(type(module))
    return (
        kind is not None
        and is_attached(module, kind.name, kind.method)
        and not has_hooks(module)
        and getattr(module, "root_weight", True)
        and not getattr(module, "project", False)
    )


def takes_attributes(module: Any) -> bool:
    """Whether a convolution that goes with others is told what belongs to edges."""
    return _KINDS[type(module)].takes_attributes


def _is_layer(alike: list[_Alike], count: int) -> bool:
    """Whether all relations are SAGEConv or GraphConv that go together, whose results are added where they lie."""
    return len(alike[0].numbers) == count and alike[0].kind is _SUMS and not any(
        getattr(relation.conv, "normalize", False) for relation in alike[0].relations)  # fmt: skip


def _read(module: Any, x: Tensor, own: Tensor) -> Hashable:
    """What SAGEConv and GraphConv must have in common to be summed together; None for those summed by themselves."""
    reduce = find_reduce(module)
    if (
        reduce not in ("sum", "mean")
        or x.dtype not in DTYPES
        or not root._are_matrices(*_matrices(module), (x, own))
        or not (runs_on_gpu(x) or wins_on_cpu(x))
    ):
        return None
    return reduce, x.shape[1], x.dtype


def _matrices(module: Any) -> tuple[Any, Any]:
    """That of the sums and that of a target's own row."""
    first, second = _MATRICES[type(module)]
    return getattr(module, first), getattr(module, second)


def _convolve_each(relations: Sequence[Relation]) -> list[Tensor]:
    outs = _convolve(relations, [[number] for number in range(len(relations))])
    return [F.normalize(out, p=2.0, dim=-1) if getattr(relation.conv, "normalize", False) else out
            for out, relation in zip(outs, relations, strict=True)]  # fmt: skip


def _convolve(relations: Sequence[Relation], groups: list[list[int]]) -> list[Tensor]:
    """Results of SAGEConv and GraphConv, added up by group."""
    tables = Tables.of(relations)
    num_sources = len(tables.tables)
    tracked = torch.is_grad_enabled() and any(table.requires_grad for table in tables.tables)
    joined = join_edges(relations, tables.starts, tables.num_rows)
    edges = TypedEdges(joined.indptr, joined.row, joined.target, joined.sizes, tables.places, tables.add_own(relations),
                       num_sources, groups, joined.max_degree)  # fmt: skip
    pairs = [_matrices(relation.conv) for relation in relations]
    matrices = [Matrices(first.weight, first.bias, second.weight) for first, second in pairs]
    return convolve_relations(tables.tables, matrices, edges, reduce=find_reduce(relations[0].conv),
                              transposed=joined.transpose(tracked))  # fmt: skip


_SUMS = _Kind("forward", root.forward, _read, _convolve_each)
_KINDS: dict[type, _Kind] = {
    conv.SAGEConv: _SUMS,
    conv.GraphConv: _SUMS,
    conv.GINConv: _Kind("forward", gin.forward, joined_gin.read, joined_gin.convolve, joined_gin.finish),
    conv.GINEConv: _Kind("propagate", propagate, joined_gine.read, joined_gine.convolve, joined_gin.finish, True),
    conv.GATConv: _Kind("forward", attention.forward, joined_attention.read, joined_attention.convolve),
    conv.GATv2Conv: _Kind("forward", attention.forward, joined_attention.read, joined_attention.convolve_v2),
    conv.GCNConv: _Kind("forward", gcn.forward, joined_gcn.read, joined_gcn.convolve),
}


def watch_relations(module: torch.nn.Module) -> None:
    """Let a HeteroConv sum its relations in one launch where its convolutions allow it."""
    if type(module) is HeteroConv and "forward" not in module.__dict__:
        attach(module, forward=forward)


def forget_relations(module: torch.nn.Module) -> None:
    """The opposite of `watch_relations`."""
    if is_attached(module, "forward", forward):
        detach(module, "forward")
