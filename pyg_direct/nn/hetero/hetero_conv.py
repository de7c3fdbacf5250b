"""HeteroConv and models of `to_hetero` over sorted edges: like sums of a layer in one launch.

Rows of all types are concatenated, and so are the targets of all relations. Edges of a batch are joined once for the
layers that share them.

`to_hetero` writes a model as a graph of calls. Consecutive calls of a layer's convolutions, one per relation, become
one call in a second graph over the same modules. An accelerated model runs the second graph. It is part of the class
that torch makes for each such model, so copies and pickles are without it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch_geometric.nn import HeteroConv
from torch_geometric.nn.conv.hetero_conv import group

from pyg_direct.nn.conv.spec import ConvSpec, Joined
from pyg_direct.nn.dispatch import is_plain
from pyg_direct.nn.hetero.joined_edges import Relation
from pyg_direct.nn.hetero.unread_rows import drop_relations, find_rows_of_pass
from pyg_direct.nn.module_state import attach, detach, is_attached
from pyg_direct.nn.sorted_edges import find_batch
from pyg_direct.nn.trimming import has_hooks
from pyg_direct.nn.whole_graphs import find_whole, keeps_graphs
from pyg_direct.ops.run_kernel import is_recorded


class Call(NamedTuple):
    """Call of a relation's convolution.

    Attributes:
        edge_attr: Attributes of its edges, if they are given.
    """

    conv: Any
    x: Any
    edge_index: Any
    edge_attr: Any = None

    def make(self) -> Tensor:
        """Return the result of the call."""
        more = {} if self.edge_attr is None else {"edge_attr": self.edge_attr}
        made: Tensor = self.conv(self.x, self.edge_index, **more)
        return made


def forward(self: Any, *args_dict: Any, **kwargs_dict: Any) -> Any:
    """Override `forward` of a HeteroConv in an accelerated model."""
    rows = find_rows_of_pass()
    if rows is None or len(args_dict) != 2 or not kwargs_dict.keys() <= {"edge_attr_dict"}:
        return _convolve(self, {}, *args_dict, **kwargs_dict)
    given = args_dict[0].values() if isinstance(args_dict[0], dict) else ()
    call = rows.begin_call(given, changes=self.aggr != "sum")
    if call.unused:
        args_dict = args_dict[0], drop_relations(args_dict[1], call.unused)
        kwargs_dict = {name: drop_relations(value, call.unused) for name, value in kwargs_dict.items()}
    return rows.end_call(call, _convolve(self, call.num_read, *args_dict, **kwargs_dict))


def _convolve(self: Any, num_read: Mapping[str, int], *args_dict: Any, **kwargs_dict: Any) -> Any:
    """Return the results of a HeteroConv; of types in `num_read`, so many rows are enough."""
    out, attributes = None, kwargs_dict.get("edge_attr_dict", {})
    if len(args_dict) == 2 and kwargs_dict.keys() <= {"edge_attr_dict"} and not is_recorded():
        x_dict, edge_index_dict = args_dict
        kinds = [kind for kind in self.convs.keys() if kind in edge_index_dict]  # noqa: SIM118
        # PyG refuses a type without rows, and converts arguments that are given by type of node.
        if all(kind[0] in x_dict or kind[-1] in x_dict for kind in kinds) and all(
            isinstance(kind, tuple) and (kind not in self.convs or kind in edge_index_dict) for kind in attributes
        ):
            groups: dict[str, list[int]] = {}
            for number, kind in enumerate(kinds):
                groups.setdefault(kind[-1], []).append(number)
            calls = [Call(self.convs[kind], _rows_of(kind, x_dict), edge_index_dict[kind], attributes.get(kind))
                     for kind in kinds]  # fmt: skip
            out = _convolve_groups(calls, groups, self.aggr, num_read)
    return type(self).forward(self, *args_dict, **kwargs_dict) if out is None else out


def _rows_of(kind: Any, x_dict: Any) -> Any:
    """Return the rows that HeteroConv gives the convolution of a relation."""
    return x_dict[kind[0]] if kind[0] == kind[-1] else (x_dict.get(kind[0]), x_dict.get(kind[-1]))


def _convolve_groups(calls: list[Call], groups: dict[str, list[int]], aggr: str | None, num_read: Mapping[str, int]
                     ) -> dict[str, Tensor] | None:  # fmt: skip
    """Return rows of each target type, from the results of the relations into it; None if each relation is separate."""
    alike = _find_alike(calls)
    # Relations of a recorded whole graph gain from a sum if several lead to one type.
    whole = _find_alike(calls, is_whole=True) if not alike and len(groups) < len(calls) and keeps_graphs() else []
    found, outs = whole or alike, None
    if found and aggr in ("sum", "mean") and _is_layer(found, len(calls)):
        kind, relations, numbers = found[0].kind, found[0].relations, list(groups.values())
        if whole and kind.add_up_whole is not None:
            outs = kind.add_up_whole(relations, numbers)
        elif not whole and kind.add_up is not None:
            outs = kind.add_up(relations, numbers, [num_read.get(target) for target in groups])
    if outs is not None:
        for relation in found[0].relations:
            relation.conv._paths.note()
        return {kind: out / len(groups[kind]) if aggr == "mean" and len(groups[kind]) > 1 else out
                for kind, out in zip(groups, outs, strict=True)}  # fmt: skip
    results = _convolve_alike(calls, alike)
    if results is None:
        return None
    return {kind: group([results[i] for i in numbers], aggr) for kind, numbers in groups.items()}


def convolve_together(calls: Sequence[Call]) -> list[Tensor] | None:
    """Return the results of a layer's convolutions, like ones in one launch.

    Returns:
        Rows of the targets of each; None if each is separate.
    """
    return _convolve_alike(calls, _find_alike(calls))


class _Alike(NamedTuple):
    """Relations of one launch, and their positions among the calls."""

    kind: Joined
    numbers: list[int]
    relations: list[Relation]


def _find_alike(calls: Sequence[Call], *, is_whole: bool = False) -> list[_Alike]:
    """Return relations that go together, two or more each: a single sum takes one launch anyway.

    Args:
        is_whole: Find relations of whole graphs, which need not share a key.
    """
    found: dict[Hashable, _Alike] = {}
    for number, (module, x, edge_index, attribute) in enumerate(calls):
        kind, rows = find_joined(module), x if isinstance(x, tuple) else (x, x)
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
        batch = find_whole(edge_index, own.shape[0], 0) if is_whole else find_batch(edge_index)
        if batch is None or not batch.fits(edge_index, sources.shape[0], own.shape[0]):
            continue
        if kind.takes_attributes and attribute.shape[:1] != edge_index.shape[1:]:
            continue
        common = kind.read(module, sources, own, *([attribute] if kind.takes_attributes else []))
        if common is not None:
            # Classes of one kind sum together.
            alike = found.setdefault(
                (kind, sources.device, sources.dtype if is_whole else common), _Alike(kind, [], [])
            )
            alike.numbers.append(number)
            alike.relations.append(Relation(module, batch, edge_index, sources, own, attribute))
    return [alike for alike in found.values() if len(alike.numbers) > 1]


def _convolve_alike(calls: Sequence[Call], alike: Sequence[_Alike]) -> list[Tensor] | None:
    """Return results of all calls, separate ones one by one; None if none go together."""
    if not alike:
        return None
    outs: dict[int, tuple[Joined, Tensor]] = {}
    for kind, numbers, relations in alike:
        made = kind.convolve(relations)
        if made is not None:
            for relation in relations:
                relation.conv._paths.note()
            outs.update((i, (kind, out)) for i, out in zip(numbers, made, strict=True))
    results: list[Tensor] = []
    # In the order of the calls, which random numbers follow too.
    for number, call in enumerate(calls):
        if number not in outs:
            results.append(call.make())
            continue
        kind, out = outs[number]
        results.append(out if kind.finish is None else kind.finish(call.conv, out))
    return results


def find_joined(module: Any) -> Joined | None:
    """Return the form of an accelerated convolution over relations; None for others, and for classes derived from
    PyG's.
    """
    spec: ConvSpec | None = module.__dict__.get("_spec")
    return None if spec is None or type(module) is not spec.kind else spec.joined


def is_accelerated(module: Any) -> bool:
    """Report whether a convolution is accelerated, without hooks, and without steps before its sum."""
    spec = module.__dict__.get("_spec")
    name = "propagate" if spec is None or spec.forward is None else "forward"
    return (
        find_joined(module) is not None
        and is_attached(module, name, getattr(spec, name))
        and not has_hooks(module)
        and getattr(module, "root_weight", True)
        and not getattr(module, "project", False)
    )


def takes_attributes(module: Any) -> bool:
    """Report whether a convolution that goes with others receives attributes of edges."""
    joined = find_joined(module)
    return joined is not None and joined.takes_attributes


def _is_layer(alike: list[_Alike], count: int) -> bool:
    """Report whether all relations go together, and their results may be added in place."""
    return len(alike[0].numbers) == count and not any(
        getattr(relation.conv, "normalize", False) for relation in alike[0].relations)  # fmt: skip


def watch_relations(module: torch.nn.Module) -> None:
    """Let a HeteroConv sum its relations in one launch if its convolutions allow it."""
    if type(module) is HeteroConv and "forward" not in module.__dict__:
        attach(module, forward=forward)


def forget_relations(module: torch.nn.Module) -> None:
    """Undo `watch_relations`."""
    if is_attached(module, "forward", forward):
        detach(module, "forward")


class _Together(torch.nn.Module):
    """Convolutions of a layer, given (rows, edges, attributes of edges) of each in turn."""

    def __init__(self, convs: list[Any]) -> None:
        super().__init__()
        # In a tuple, so that they belong to the model alone.
        self.convs = tuple(convs)

    def forward(self, *given: Any) -> list[Tensor]:
        """Return the results of each."""
        calls = [Call(*parts) for parts in zip(self.convs, given[::3], given[1::3], given[2::3], strict=True)]
        outs = convolve_together(calls)
        return [call.make() for call in calls] if outs is None else outs


def watch_graph(model: torch.nn.Module) -> None:
    """Let a model of `to_hetero` sum the relations of a layer in one launch if its convolutions allow it."""
    if not isinstance(model, fx.GraphModule) or hasattr(type(model).forward, "plain"):
        return
    # Any attribute except modules that such a graph reads of its model may be another tensor later.
    if any(node.op == "get_attr" for node in model.graph.nodes):
        return
    groups = list(_find_groups(model))
    if not groups:
        return
    graph = fx.Graph()
    places: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(model.graph, places))
    modules: dict[str, Any] = {}
    for number, nodes_together in enumerate(groups):
        name = f"together_{number}"
        modules[name] = _Together([model.get_submodule(str(node.target)) for node in nodes_together])
        nodes = [places[node] for node in nodes_together]
        with graph.inserting_before(nodes[0]):
            call = graph.call_module(name, tuple(part for node in nodes for part in _list_given(node)))
            for i, node in enumerate(nodes):
                node.replace_all_uses_with(graph.call_function(_take, (call, i)))
        for node in nodes:
            graph.erase_node(node)
    modules |= {str(node.target): model.get_submodule(str(node.target)) for node in graph.nodes
                if node.op == "call_module" and node.target not in modules}  # fmt: skip
    fast, plain = fx.GraphModule(modules, graph), type(model).forward
    held = list(_list_modules(model))

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_recorded() or self is not model or any(of.get(name) is not m for of, name, m in held):
            return plain(self, *args, **kwargs)
        return type(fast).forward(fast, *args, **kwargs)

    forward.plain = plain  # type: ignore[attr-defined]
    type(model).forward = forward  # type: ignore[method-assign]


def _list_modules(model: fx.GraphModule) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """List (owner's modules, name, module) of all modules that the graph calls and of their owners: others may take
    their places.
    """
    paths = {path[: i + 1] for node in model.graph.nodes if node.op == "call_module"
             for path in [tuple(str(node.target).split("."))] for i in range(len(path))}  # fmt: skip
    for path in paths:
        owner = model.get_submodule(".".join(path[:-1]))
        yield owner._modules, path[-1], owner._modules[path[-1]]


def _take(outs: list[Tensor], number: int) -> Tensor:
    return outs[number]


def _find_groups(model: fx.GraphModule) -> Iterator[list[fx.Node]]:
    """List calls of accelerated convolutions of one layer that follow each other, none of which needs another's
    result.
    """
    group: list[fx.Node] = []
    for node in [*model.graph.nodes, None]:
        fits = node is not None and _is_convolution(model, node)
        if group and not (fits and _layer_of(node) == _layer_of(group[0]) and not set(node.all_input_nodes) & {*group}):
            if len(group) > 1:
                yield group
            group = []
        if fits:
            group.append(node)


def _is_convolution(model: fx.GraphModule, node: fx.Node) -> bool:
    if node.op != "call_module" or not 2 <= len(node.args) <= 3 or not node.kwargs.keys() <= {"edge_attr"}:
        return False
    module, attributes = model.get_submodule(str(node.target)), len(node.args) - 2 + len(node.kwargs)
    return is_accelerated(module) and attributes == int(takes_attributes(module))


def _list_given(node: fx.Node) -> list[Any]:
    """Return (rows, edges, attributes of edges) of a call."""
    given = [*node.args, *node.kwargs.values()]
    return given if len(given) == 3 else [*given, None]


def _layer_of(node: fx.Node) -> str:
    return str(node.target).rpartition(".")[0]


def forget_graph(model: torch.nn.Module) -> None:
    """Undo `watch_graph`."""
    plain = getattr(type(model).forward, "plain", None)
    if isinstance(model, fx.GraphModule) and plain is not None:
        type(model).forward = plain  # type: ignore[method-assign]
