"""Models of `to_hetero` over sorted edges: the convolutions of a layer, one for each relation, called together.

`to_hetero` writes a model out as a graph of calls. Those of a layer's convolutions that follow each other become one
call in a second graph over the same modules, which an accelerated model runs. It is part of the class that torch makes
for each such model, so that copies and pickles are without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from pyg_direct.nn.joined import Call, convolve_together, is_accelerated, takes_attributes
from pyg_direct.ops.launch import is_recorded


class _Together(torch.nn.Module):
    """Convolutions of a layer, given (rows, edges, what belongs to edges) of each in turn."""

    def __init__(self, convs: list[Any]) -> None:
        super().__init__()
        # In a tuple, so that they belong to the model alone.
        self.convs = tuple(convs)

    def forward(self, *given: Any) -> list[Tensor]:
        """What each of them returns."""
        calls = [Call(*parts) for parts in zip(self.convs, given[::3], given[1::3], given[2::3], strict=True)]
        outs = convolve_together(calls)
        return [call.make() for call in calls] if outs is None else outs


def watch_graph(model: torch.nn.Module) -> None:
    """Let a model of `to_hetero` sum the relations of a layer in one launch where its convolutions allow it."""
    if not isinstance(model, fx.GraphModule) or hasattr(type(model).forward, "plain"):
        return
    # Anything that such a graph reads of its model but modules may be another tensor later.
    if any(node.op == "get_attr" for node in model.graph.nodes):
        return
    groups = list(_find_groups(model))
    if not groups:
        return
    graph = fx.Graph()
    places: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(model.graph, places))
    modules: dict[str, Any] = {}
    for number, group in enumerate(groups):
        name = f"together_{number}"
        modules[name] = _Together([model.get_submodule(str(node.target)) for node in group])
        nodes = [places[node] for node in group]
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
    """(owner's modules, name, module) of all that the graph calls and of their owners: others may take their places."""
    paths = {path[: i + 1] for node in model.graph.nodes if node.op == "call_module"
             for path in [tuple(str(node.target).split("."))] for i in range(len(path))}  # fmt: skip
    for path in paths:
        owner = model.get_submodule(".".join(path[:-1]))
        yield owner._modules, path[-1], owner._modules[path[-1]]


def _take(outs: list[Tensor], number: int) -> Tensor:
    return outs[number]


def _find_groups(model: fx.GraphModule) -> Iterator[list[fx.Node]]:
    """Calls of accelerated convolutions of one layer that follow each other, none of which needs another's result."""
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
    """(rows, edges, what belongs to edges) of a call."""
    given = [*node.args, *node.kwargs.values()]
    return given if len(given) == 3 else [*given, None]


def _layer_of(node: fx.Node) -> str:
    return str(node.target).rpartition(".")[0]


def forget_graph(model: torch.nn.Module) -> None:
    """The opposite of `watch_graph`."""
    plain = getattr(type(model).forward, "plain", None)
    if isinstance(model, fx.GraphModule) and plain is not None:
        type(model).forward = plain  # type: ignore[method-assign]
