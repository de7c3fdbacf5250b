"""`accelerate`: PyG's convolutions aggregate through our operators where a batch is known to be sorted.

A convolution with a `ConvSpec` is served by that, any other `MessagePassing` as `any_convolution.py` has it.

A convolution keeps its class, parameters and hooks; its instance gets a `propagate` (and where PyG rebuilds the edges
in `forward`, a `forward`) of its own, bound to it, which deep copies have and pickles do not. Whatever is out of the
ordinary goes PyG's own way.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch_geometric.nn import conv

from pyg_direct.errors import ArgumentTypeError
from pyg_direct.nn import any_convolution
from pyg_direct.nn.conv.spec import ConvSpec
from pyg_direct.nn.conv.table import find_spec
from pyg_direct.nn.dispatch import STEPS, find_obstacle, propagate, reduces
from pyg_direct.nn.hetero.hetero_conv import forget_graph, forget_relations, watch_graph, watch_relations
from pyg_direct.nn.module_state import attach, detach, is_attached
from pyg_direct.nn.paths import ConvReport, Paths, Report, describe_left, make_paths
from pyg_direct.nn.replay.model_replay import Replay, check, forget_replay, watch_passes
from pyg_direct.nn.sorted_edges import UnknownEdges
from pyg_direct.nn.trimming import forget_trimming, watch_trimming
from pyg_direct.ops.argument_checks import check_flag
from pyg_direct.progress import announce


class Acceleration:
    """What `accelerate` changed, and what it did so far. It is no model: the model itself was changed.

    Attributes:
        replay: What is replayed of the model's passes, with the numbers `replayed` and `ordinary`, and a `reason` where
            none is; None unless that was asked for.
    """

    def __init__(self, model: torch.nn.Module, replay: Replay | None = None) -> None:
        self._model, self.replay = model, replay

    @property
    def convolutions(self) -> dict[str, str]:
        """Class of each accelerated convolution, by its name in the model.

        Those whose options, hooks or narrow rows leave them to PyG's code now are not among them.
        """
        return {name: type(module).__name__ for name, module in self._model.named_modules() if is_served(module)}

    def report(self) -> Report:
        """List each convolution with its calls so far, by path, and why calls were left to PyG.

        Passes that are replayed as CUDA graphs call no convolution; `replay` of the report has their number.

        Returns:
            The report, whose text has a line for each convolution. After `undo()` calls are not counted any more.

        Example:
            >>> from torch_geometric.nn import GraphSAGE
            >>> print(accelerate(GraphSAGE(16, 32, num_layers=1, aggr="lstm")).report())
            convs.0: SAGEConv, left to PyG: LSTMAggregation has no operator
        """
        listed = []
        for name, module in self._model.named_modules():
            if isinstance(module, conv.MessagePassing):
                paths = module.__dict__.get("_paths", _NO_PATHS)
                listed.append(ConvReport(name, type(module).__name__, paths.accelerated, dict(paths.left),
                                         find_why_left(module)))  # fmt: skip
        return Report(listed, None if self.replay is None else repr(self.replay))

    def undo(self) -> None:
        """Give the model and its convolutions their own code back."""
        forget_replay(self._model)
        for module in self._model.modules():
            _strip(module)
            forget_trimming(module)
            forget_relations(module)
            forget_graph(module)

    def __repr__(self) -> str:
        listed = ", ".join(f"{name}: {kind}" for name, kind in self.convolutions.items())
        return f"Acceleration({listed})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to stand for the model.

        Raises:
            ArgumentTypeError: always.
        """
        raise ArgumentTypeError(_GO_ON)

    def __getattr__(self, name: str) -> Any:
        if hasattr(torch.nn.Module, name) and not name.startswith("__"):
            raise AttributeError(f"{_GO_ON}.{name}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


_GO_ON = "`accelerate` changes the model in place: go on with `model`"
# Of a convolution that was never accelerated.
_NO_PATHS = Paths()


def accelerate(model: torch.nn.Module, *, replay: bool = False) -> Acceleration:
    """Let the convolutions of a PyG model aggregate batches of our loaders with one fused kernel each.

    SAGEConv, GraphConv, GCNConv, GINConv, GINEConv, GATConv, GATv2Conv, RGCNConv and HGTConv are found, also inside
    HeteroConv and models of `to_hetero`, whose relations take one kernel together (GATConv and GATv2Conv up to two)
    where two or more are alike: SAGEConv and GraphConv, GINConv, GINEConv, GCNConv, or GATConv or GATv2Conv without
    loops, whose dropout then draws other numbers than PyG's; subclasses only where they leave the messages alone. PyG's
    own models that are given `num_sampled_nodes_per_hop` also compute no rows that the next layer drops; dropout then
    falls on other rows than PyG's would. That of attention with loops falls on other edges. Results are those of PyG up
    to rounding. A whole graph that comes back is sorted once, and aggregated likewise (a small one only on a GPU, by
    GCNConv, GATConv and GATv2Conv, and by all without a gradient).

    Any other `MessagePassing`, of PyG's or of a program's own, keeps its code and its hooks. Where the order of its
    edges is known, its aggregation (sum, mean, max, min, mul, var, std, softmax, power means, several of them, also
    scaled by degrees) goes through their offsets, and so do PyG's `softmax` and `scatter` over its targets; on a GPU in
    one order of additions, forward and backward. A CPU does so where that is faster: at maxima, minima, products and
    softmax of features, over 8,192 edges and more. Loops that a layer adds to its edges leave these to PyG.

    On a GPU neither the edges of a whole graph nor a batch's are looked at again while torch has not seen them written
    to, as through `.data` or DLPack. Batches of other loaders, options that are not covered, explanations, hooks on
    messages and compiled or traced models take PyG's own code, unchanged. The model can be saved, copied and scripted
    as before; what is saved of it is PyG's alone, and loads where this package is not. `convolutions` of what is
    returned, and its text, name the layers that are served as they are set up: also after options, hooks or the device
    have changed.

    Steps of a small model take the host longer to launch than a GPU to compute. With `replay`, training passes of the
    model, forward and backward, are recorded as CUDA graphs after some, in places for batches that are a little larger,
    and replayed for batches of the same loader; the training loop stays as it is. Before, a pass is tried over such
    places: where it waits for the GPU, sets attributes, writes to its arguments, draws random numbers of the host or
    sees other nodes than neighbors, none is replayed, and a warning says why. Ordinary passes are also those without
    gradients or in `eval()`, over batches that find no room, with types, or of other loaders, while an earlier pass may
    still go back, under checkpoints, and where hooks of layers or explanations look on. A model must be given the edges
    of a batch, rows of its nodes or edges, its numbers of nodes and edges of each hop, or what stays the same, and give
    rows of nodes. It may keep settings, tensors and functions as attributes; what is in objects of its own, or changes
    outside of it, is taken as it was when it was recorded. A replayed pass goes back once, and without a graph of its
    own; memory of a pass is held twice. A model that DistributedDataParallel is to hold is accelerated before.

    Args:
        model: Any module; it is changed in place.
        replay: Replay passes of the model as CUDA graphs, on a GPU; those of a model within it no longer are.

    Returns:
        What was accelerated, with `report()` and `undo()`. The logger `pyg_direct` names convolutions that are left to
        PyG as they are set up, once.

    Raises:
        ArgumentTypeError: `model` is no module, or `replay` no switch.
        ArgumentError: with `replay`, a norm of the model looks at all nodes, the model is itself a convolution, or what
            holds it for several GPUs.

    Example:
        >>> from torch_geometric.nn import GraphSAGE
        >>> model = GraphSAGE(16, 32, num_layers=2, out_channels=4)
        >>> accelerated = accelerate(model)
        >>> accelerated
        Acceleration(convs.0: SAGEConv, convs.1: SAGEConv)
        >>> accelerated.undo()
    """
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    replay = check_flag("replay", replay)
    if replay:
        check(model)
    for module in model.modules():
        forget_replay(module)
    for module in model.modules():
        accelerate_one(module)
    for module in model.modules():
        watch_trimming(module)
        watch_relations(module)
        watch_graph(module)
    _tell_left(model)
    return Acceleration(model, watch_passes(model) if replay else None)


def _tell_left(model: torch.nn.Module) -> None:
    """Name the convolutions that PyG's code serves as they are set up, in one line."""
    found = ((name, module, find_why_left(module)) for name, module in model.named_modules()
             if isinstance(module, conv.MessagePassing))  # fmt: skip
    left = [(name, type(module).__name__, reason) for name, module, reason in found if reason is not None]
    if left:
        announce(describe_left(left))


def is_served(module: Any) -> bool:
    """Whether an accelerated convolution aggregates batches of our loaders, and not PyG's code, as it is set up now.

    What a call brings besides is not known here: weights of edges make the maximum of a GraphConv PyG's.
    """
    return isinstance(module, conv.MessagePassing) and find_why_left(module) is None


def find_why_left(module: Any) -> str | None:
    """Why PyG's code aggregates what a convolution is given, as it is set up now; None where `is_served`."""
    if "_paths" not in module.__dict__:
        is_replaced = "propagate" in module.__dict__
        return "its `propagate` was replaced, as for decomposed layers" if is_replaced else "it is not accelerated"
    spec = module.__dict__.get("_spec")
    if spec is None:
        is_ours = is_attached(module, "propagate", any_convolution.propagate)
        return any_convolution.find_left(module) if is_ours else "its `propagate` was replaced, as for explanations"
    if not ((spec.forward is not None and is_attached(module, "forward", spec.forward))
            or (spec.propagate is not None and is_attached(module, "propagate", spec.propagate))):  # fmt: skip
        return "a program replaced one of its steps"
    if spec.propagate is propagate and not reduces(module):
        # Served as any other.
        return any_convolution.find_left(module)
    return find_obstacle(module) or spec.find_left(module)


def accelerate_one(module: torch.nn.Module) -> None:
    """Accelerate a convolution, and nothing that it holds."""
    if not isinstance(module, conv.MessagePassing):
        return
    _strip(module)
    spec = find_spec(type(module))
    kind = type(module)
    if spec is None or not _is_untouched(module, spec):
        _accelerate_any(module)
        return
    attach(module, _spec=spec, _paths=make_paths(kind))
    if spec.propagate is propagate:
        any_convolution.accelerate_any(module)
        if not reduces(module):
            any_convolution.watch_aggregation(module)
    if spec.propagate is not None:
        attach(module, propagate=spec.propagate, _unknown=UnknownEdges())
    for part in spec.parts:
        if getattr(kind, part.__name__) is getattr(spec.kind, part.__name__):
            attach(module, **{part.__name__: part})
    if spec.forward is not None and kind.forward is spec.kind.__dict__["forward"]:
        # TorchScript compiles the `forward` of the instance.
        attach(module, forward=spec.forward, __prepare_scriptable__=copy.copy)


def _accelerate_any(module: Any) -> None:
    """Accelerate a layer that has no `ConvSpec`, or does other things than that."""
    if not _has_written_propagate(module) or "forward" in module.__dict__:
        # Of a program, or of PyG for decomposed layers.
        return
    attach(module, _paths=make_paths(type(module)), propagate=any_convolution.propagate,
           __prepare_scriptable__=any_convolution.prepare_scriptable)  # fmt: skip
    any_convolution.accelerate_any(module)
    any_convolution.watch_aggregation(module)


def _has_written_propagate(module: Any) -> bool:
    """Whether a layer has the `propagate` that PyG writes for each class, and puts on instances that were explained."""
    written = type(module).propagate
    is_written = written is conv.MessagePassing.propagate or written.__module__.endswith("_propagate")
    return is_written and getattr(module.__dict__.get("propagate", written), "__func__", written) is written


def _is_untouched(module: Any, spec: ConvSpec) -> bool:
    """Whether a subclass and the instance do with messages what PyG's class does."""
    return (
        _has_written_propagate(module)
        and spec.is_own(type(module))
        and module.__dict__.keys().isdisjoint((*STEPS, "forward"))
    )


def _strip(module: torch.nn.Module) -> None:
    spec = module.__dict__.get("_spec")
    any_convolution.forget_any(module)
    if "_paths" not in module.__dict__:
        return
    parts = () if spec is None else (spec.forward, spec.propagate, *spec.parts)
    for part in (any_convolution.propagate, *parts):
        if part is not None and is_attached(module, part.__name__, part):
            detach(module, part.__name__)
    detach(module, "__prepare_scriptable__", "_unknown", "_paths", "_spec")
