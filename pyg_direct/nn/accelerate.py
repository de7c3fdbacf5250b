"""`accelerate`: PyG's convolutions aggregate through accelerated operators if a batch is known to be sorted.

A convolution with a `ConvSpec` is served by it, any other `MessagePassing` by `any_convolution.py`.

A convolution keeps its class, parameters and hooks. Its instance gets its own bound `propagate`, and a `forward` if PyG
rebuilds the edges there. Deep copies have these overrides, pickles do not. Every unusual case goes PyG's own way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch_geometric.nn import conv

from pyg_direct.errors import ArgumentTypeError
from pyg_direct.nn import any_convolution
from pyg_direct.nn.conv.spec import ConvSpec
from pyg_direct.nn.conv.table import find_spec
from pyg_direct.nn.dispatch import STEPS, find_obstacle, propagate, reduces
from pyg_direct.nn.hetero.hetero_conv import forget_graph, forget_relations, watch_graph, watch_relations
from pyg_direct.nn.module_state import attach, copy_plain, detach, is_attached
from pyg_direct.nn.paths import ConvReport, Paths, Report, describe_left, make_paths
from pyg_direct.nn.replay.model_replay import Replay, check, forget_replay, may_watch, replays_by_default, watch_passes
from pyg_direct.nn.trimming import forget_trimming, watch_trimming
from pyg_direct.nn.whole_graphs import UnknownEdges
from pyg_direct.object_text import one_line
from pyg_direct.progress import announce


class Acceleration:
    """Changes that `accelerate` made, and counts of calls so far. It is no model: the model itself was changed.

    Attributes:
        replay: Counts of replayed passes (`replayed`, `ordinary`), and a `reason` if none is replayed; None if replay
            was refused, or there is no GPU.
    """

    def __init__(self, model: torch.nn.Module, replay: Replay | None = None) -> None:
        self._model, self.replay = model, replay

    @property
    def convolutions(self) -> dict[str, str]:
        """Class of each accelerated convolution, by its name in the model.

        Convolutions whose options, hooks or narrow rows leave them to PyG's code now are not included.
        """
        return {name: type(module).__name__ for name, module in self._model.named_modules() if is_served(module)}

    def report(self) -> Report:
        """List each convolution with its calls so far, by path, and the reasons of calls that were left to PyG.

        Passes that are replayed as CUDA graphs call no convolution; `replay` of the report has their number.

        Returns:
            The report, whose text has a line for each convolution. After `undo()` calls are no longer counted.

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
        """Restore the original code of the model and its convolutions."""
        forget_replay(self._model)
        for module in self._model.modules():
            _strip(module)
            forget_trimming(module)
            forget_relations(module)
            forget_graph(module)

    @one_line
    def __repr__(self) -> Iterator[str]:
        for name, kind in self.convolutions.items():
            yield f"{name}: {kind}" if name else kind
        if self.replay is not None and (self.replay.replayed or self.replay.reason is not None):
            yield repr(self.replay)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse a call as if it were the model."""
        raise ArgumentTypeError(_GO_ON)

    def __getattr__(self, name: str) -> Any:
        if hasattr(torch.nn.Module, name) and not name.startswith("__"):
            raise AttributeError(f"{_GO_ON}.{name}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


_GO_ON = "`accelerate` changes the model in place: go on with `model`"
# Of a convolution that was never accelerated.
_NO_PATHS = Paths()


def accelerate(model: torch.nn.Module, *, replay: bool | str | None = None) -> Acceleration:
    """Make the convolutions of a PyG model aggregate batches of pyg_direct loaders with one fused kernel each.

    It finds SAGEConv, GraphConv, GCNConv, GINConv, GINEConv, GATConv, GATv2Conv, RGCNConv, FastRGCNConv, HGTConv,
    TransformerConv and PNAConv, also inside HeteroConv and models of `to_hetero`. Besides, it finds EdgeConv, NNConv,
    GENConv, ResGatedGraphConv, SuperGATConv, and FiLMConv with one relation. Two or more like relations take one kernel
    together (GATConv and GATv2Conv up to two). Relations are alike if all are SAGEConv and GraphConv, GINConv,
    GINEConv, GCNConv, or GATConv or GATv2Conv without loops; dropout of the latter then draws other numbers than PyG's.
    Subclasses are served only if they leave the messages unchanged.

    If PyG's own models are given `num_sampled_nodes_per_hop`, they also compute no rows that the next layer drops.
    Dropout then falls on other rows than in PyG. Dropout of attention with loops, or of TransformerConv over a
    whole graph, falls on other edges than in PyG.
    Results equal PyG's up to rounding. A whole graph that comes back is sorted once, and aggregated in the same way.
    A small graph needs a GPU. With a gradient this serves GCNConv, GATConv, GATv2Conv, RGCNConv, FastRGCNConv,
    TransformerConv, PNAConv and the layers named after it, without a gradient all.

    Any other `MessagePassing`, of PyG or of a program, keeps its code and its hooks. If the order of its edges is
    known, its aggregation goes through their offsets, and so do PyG's `softmax` and `scatter` over its targets.
    Aggregations are sum, mean, max, min, mul, var, std, softmax, power means, and several of them, also scaled by
    degrees. On a GPU additions have one order, forward and backward. A CPU does so only if it is faster: for maxima,
    minima, products and softmax of features, over 8,192 edges and more. If a layer adds loops to its edges, PyG's code
    runs.

    On a GPU, edges of a whole graph or a batch are read again only if torch has seen a write to them; writes through
    `.data` or DLPack are not seen. PyG's own code runs unchanged for batches of other loaders, options that are not
    covered, explanations, hooks on messages, and compiled or traced models. The model can be saved, copied and scripted
    as before. The saved model is PyG's alone, and loads without this package. `convolutions` of the result, and its
    text, name the layers that are served in their present state. They follow later changes of options, hooks and the
    device.

    For a small model the host takes longer to launch a step than a GPU to compute it. On a GPU, passes of the model,
    forward and backward, are therefore recorded as CUDA graphs after a few steps. They use places for batches that are
    a little larger, and are replayed for batches of the same loader. The training loop stays unchanged. Passes over a
    whole graph that comes back are replayed too, with and without gradients, also in `eval()`.

    Before that, a pass is tried over such places. No pass is replayed if the trial waits for the GPU, sets attributes
    or writes to its arguments. The same holds if it draws random numbers of the host, or if rows of a batch depend on
    nodes other than neighbors. One line of the logger `pyg_direct` says why. Passes are also ordinary under
    checkpoints, hooks of layers and explanations, and if torch compiles a part of the model. The same holds for batches
    that do not fit or come from other loaders, and while an earlier pass may still run backward.

    Over batches, arguments of the model may be the edges of a batch, rows of its nodes or edges, counts of each hop, or
    constants. It must return rows of nodes. With types they are dicts by type and relation, or the batch; results are
    rows of one type, or a dict of them. Over batches of `DataLoader` arguments may be the batch or its batch vector and
    number of graphs too, and results rows of graphs. Over a whole graph, arguments and results may be lists, tuples and
    dicts of tensors and constants. The model may keep settings, tensors and functions as attributes. Globals and
    objects that its code reads are compared in each pass, but not the objects that these hold. Nothing is
    replayed if forward reads other tensors, prints, or keeps more than a quarter of the GPU's free memory.

    Results and gradients are in new memory, and memory of a pass is held twice. If a replayed pass runs backward again,
    or with a graph of its own, it is computed anew, with the same draws. From the first replayed pass on, backward runs
    in the thread that calls it, as by `torch.autograd.set_multithreading_enabled(False)`. Accelerate a model before
    DistributedDataParallel wraps it.

    Args:
        model: Any module; it is changed in place.
        replay: Replay passes of the model as CUDA graphs, on a GPU; replays of models within it end. `"auto"` replays
            only what is known to be right, and never raises; None does so if there is a GPU. True replays training
            passes over batches only, and warns if it cannot on a GPU. False replays nothing.

    Returns:
        The changes, with `report()` and `undo()`. The logger `pyg_direct` names convolutions that are left to PyG in
        their present state, once.

    Raises:
        ArgumentTypeError: `model` is no module, or `replay` is neither a bool nor `"auto"` nor None.
        ArgumentError: `replay` is True, and the model is itself a convolution, a HeteroConv, or a wrapper for several
            GPUs.

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
    is_auto = replays_by_default() if replay is None else isinstance(replay, str) and replay == "auto"
    if not (is_auto or replay is None or isinstance(replay, bool)):
        raise ArgumentTypeError(f'replay must be True, False, "auto" or None, got {replay!r}')
    is_replayed = may_watch(model) if is_auto else bool(replay)
    if is_replayed and not is_auto:
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
    return Acceleration(model, watch_passes(model, is_strict=is_auto) if is_replayed else None)


def _tell_left(model: torch.nn.Module) -> None:
    """Log the convolutions that PyG's code serves in their present state, in one line."""
    found = ((name, module, find_why_left(module)) for name, module in model.named_modules()
             if isinstance(module, conv.MessagePassing))  # fmt: skip
    left = [(name, type(module).__name__, reason) for name, module, reason in found if reason is not None]
    if left:
        announce(describe_left(left))


def is_served(module: Any) -> bool:
    """Report whether an accelerated convolution aggregates batches of pyg_direct loaders itself, and not by PyG's code,
    in its present state.

    Arguments of a call are not known here: edge weights leave the maximum of a GraphConv to PyG.
    """
    return isinstance(module, conv.MessagePassing) and find_why_left(module) is None


def find_why_left(module: Any) -> str | None:
    """Return why PyG's code aggregates for a convolution in its present state; None if `is_served`."""
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
        # Served as any other layer.
        return any_convolution.find_left(module)
    if spec.leaves_to_any:
        return None if spec.find_left(module) is None else any_convolution.find_left(module)
    return find_obstacle(module) or spec.find_left(module)


def accelerate_one(module: torch.nn.Module, paths: type[Paths] = Paths) -> None:
    """Accelerate a convolution, but no module that it holds."""
    if not isinstance(module, conv.MessagePassing):
        return
    _strip(module)
    spec = find_spec(type(module))
    kind = type(module)
    if spec is None or not _is_untouched(module, spec):
        _accelerate_any(module, paths)
        return
    attach(module, _spec=spec, _paths=make_paths(kind, paths))
    if spec.propagate is propagate or spec.leaves_to_any:
        any_convolution.accelerate_any(module)
        if spec.leaves_to_any or not reduces(module):
            any_convolution.watch_aggregation(module)
        if spec.leaves_to_any:
            attach(module, __prepare_scriptable__=copy_plain)
    if spec.propagate is not None:
        attach(module, propagate=spec.propagate, _unknown=UnknownEdges())
    for part in spec.parts:
        if getattr(kind, part.__name__) is getattr(spec.kind, part.__name__):
            attach(module, **{part.__name__: part})
    if spec.forward is not None and kind.forward is spec.kind.__dict__["forward"]:
        # TorchScript compiles the `forward` of the instance.
        attach(module, forward=spec.forward, __prepare_scriptable__=copy_plain)


def _accelerate_any(module: Any, paths: type[Paths]) -> None:
    """Accelerate a layer that has no `ConvSpec`, or does more than its `ConvSpec`."""
    if not _has_written_propagate(module) or "forward" in module.__dict__:
        # From a program, or from PyG for decomposed layers.
        return
    attach(module, _paths=make_paths(type(module), paths), propagate=any_convolution.propagate,
           __prepare_scriptable__=copy_plain)  # fmt: skip
    any_convolution.accelerate_any(module)
    any_convolution.watch_aggregation(module)


def _has_written_propagate(module: Any) -> bool:
    """Report whether a layer has the `propagate` that PyG writes for each class, and puts on instances that were
    explained.
    """
    written = type(module).propagate
    is_written = written is conv.MessagePassing.propagate or written.__module__.endswith("_propagate")
    return is_written and getattr(module.__dict__.get("propagate", written), "__func__", written) is written


def _is_untouched(module: Any, spec: ConvSpec) -> bool:
    """Report whether a subclass and the instance leave the messages of PyG's class unchanged."""
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
