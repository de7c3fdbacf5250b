"""Training steps as one CUDA graph, with their loss and their gradients: `GraphedStep` for sampled batches, and
`RecordedStep` for frames too.

A step of a small model takes the CPU longer to launch than the GPU to compute. Batches of one layout
(`nn/replay/padded_batch.py`) let the launches be recorded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_direct.errors import ArgumentError, ArgumentTypeError, describe, warn
from pyg_direct.nn.replay.guards import find_norm_over_nodes, left_as_it_was
from pyg_direct.nn.replay.model_replay import ordinary_passes
from pyg_direct.nn.replay.padded_batch import (
    GraphSizes,
    PaddedBatch,
    PaddedGraphs,
    Sizes,
    find_other_norm,
    masked_norms,
    read_graph_sizes,
    read_sizes,
)
from pyg_direct.nn.replay.recorded_passes import leads_to
from pyg_direct.object_text import one_line, show_options
from pyg_direct.runtime.cuda.graph_capture import Recorder, find_wait

_NAMES = ("x", "y", "edge_attr", "edge_weight")
# Allowed difference of losses of a batch, for float32 and under autocast.
_APART, _APART_IF_NARROW = 1e-3, 3e-2
# Consecutive batches that did not fit, after which the places are enlarged.
_MISSES = 4


class RecordedStep:
    """Forward and backward passes of a model as one CUDA graph, with the step of the optimizer if it may be a part.

    Attributes:
        graph, loss: The graph, and the number that each replay writes; None if nothing is recorded.
        gradients: Parameters, and the memory of their gradients within the graph.
        steps_inside: True if the optimizer steps within the graph.
    """

    def __init__(self) -> None:
        self.graph: Any = None
        self.loss: Tensor | None = None
        self.gradients: list[tuple[torch.nn.Parameter, Tensor | None]] = []
        self.steps_inside = False

    def record(self, recorder: Recorder, compute: Callable[[], Tensor], model: torch.nn.Module,
               optimizer: torch.optim.Optimizer, may_step: Callable[[], bool],
               checks: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:  # fmt: skip
        """Record a step; the gradients are those of the recording alone.

        Args:
            compute: Computes the loss.
            model, optimizer: Parameters of both get the gradients.
            may_step: Called after the backward pass; True if the optimizer steps within the graph.
            checks: Makes a context of the recorded work, such as `waits_refused`.

        Raises:
            RuntimeError: see `Recorder.record`; nothing is recorded then.
        """
        losses: list[Tensor] = []

        def step() -> None:
            with checks():
                losses.append(compute())
                losses[0].backward()
                self.steps_inside = may_step()
                if self.steps_inside:
                    optimizer.step()

        forget_gradients(model, optimizer)
        try:
            self.graph = recorder.record(step)
            self.gradients = [(parameter, parameter.grad) for parameter in _list_parameters(model, optimizer)]
        finally:
            forget_gradients(model, optimizer)
        self.loss = losses[0].detach()

    def replay(self) -> Tensor:
        """Run the step again; return its loss, which the next replay writes over."""
        assert self.loss is not None, "kept with the graph"
        self.graph.replay()
        # The graph's own gradients, whatever a program did to gradients since.
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        return self.loss

    def drop(self) -> None:
        """Release the graph, whose memory serves the next."""
        self.graph = self.loss = None
        self.gradients, self.steps_inside = [], False


def forget_gradients(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Drop all gradients, also of parameters that the optimizer does not have: a graph would add to memory of their
    owner.
    """
    for parameter in _list_parameters(model, optimizer):
        parameter.grad = None


def _list_parameters(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """List the parameters of the optimizer and of the model, each once."""
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return list(dict.fromkeys([*stepped, *model.parameters()]))


def check_optimizes(optimizer: Any, model: torch.nn.Module) -> None:
    """Check that steps of an optimizer change a model.

    Args:
        optimizer: With `param_groups`, as torch's; others are not looked into.
        model: The model. One without parameters that learn asks for nothing.
    """
    groups = getattr(optimizer, "param_groups", None)
    learning = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    if groups is None or not learning:
        return
    held = [parameter for group in groups for parameter in group["params"]]
    if not any(id(parameter) in learning for parameter in held):
        raise ArgumentError(f"optimizer must hold parameters of model, got {type(optimizer).__name__} of {len(held)} "
                            "others: make it of model.parameters()")  # fmt: skip


def steps_on_gpu(optimizer: torch.optim.Optimizer) -> bool:
    """Report whether a step may be a part of a CUDA graph: a number on the host would keep its value."""
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return not any(hooks) and all(
        group.get("capturable", False) and isinstance(group.get("lr"), Tensor) and group["lr"].is_cuda
        for group in optimizer.param_groups
    )


class GraphedStep:
    """Trainer that runs whole steps as replays on a GPU; call it with each batch of a `NeighborLoader`, with types or
    without, or of a `DataLoader` of graphs without types.

    The first steps are ordinary ones, which measure the size of batches. Then a step is recorded as a CUDA graph over
    places for batches that are a little larger, and batches are copied there. A batch that does not fit, such as the
    last of an epoch, is an ordinary step; if that happens often, the places are enlarged. Losses equal those in
    ordinary steps up to rounding. On a CPU all steps are ordinary. If the GPU takes longer than the host, as with PyG's
    own kernels, there is no gain, and the padding costs a little.

    A padded batch of a `DataLoader` has one graph more, the last one, and its edges are sorted by target. So pools need
    `size=batch.num_graphs`, or `dim_size`, and a loss uses the first `len(batch.y)` of their results.

    Args:
        model: Any PyG model of convolutions, which may be accelerated. Norms over all nodes would read padding nodes,
            and are refused, except `BatchNorm` over batches of a `DataLoader`, which leaves the padding out. Other
            layers over all nodes have the same effect, but are not detected.
        compute: `compute(batch)` runs the model on a batch and returns the loss, a number. It must read nothing back
            from the GPU. Of the batch it may use only `names`, `edge_index`, `batch_size`, `num_sampled_nodes` and
            `num_sampled_edges`. Of the results it may use only the rows of the seeds, the first `batch_size`. With
            types these are of each type and relation, such as `batch.x_dict`. Of a batch of a `DataLoader` it may use
            `names`, `edge_index`, `batch`, `ptr` and `num_graphs`.
        optimizer: Steps after each replay as usual. It steps within the replay if all its groups are `capturable` with
            a tensor of the GPU for the learning rate. Gradients of other parameters of the model also come from the
            last step.
        names: Attributes of nodes and edges to be copied; None takes those among `x`, `y`, `edge_attr` and
            `edge_weight` that the batches have. Of a `DataLoader` also attributes of graphs; None takes all tensors.
        warm_up: Ordinary steps before one is recorded.
        margin: How much larger than the seen batches batches may be.
        spared: Multiprocessors that recorded matrix products leave to a loader that reads rows of the host, so that
            neither waits for the other. None leaves as many as the features of this process take when a step is
            recorded, 0 none.

    Attributes:
        replayed, ordinary: Steps of both kinds so far.
        reason: Why steps are not replayed, None if they may be.

    Raises:
        ArgumentError, ArgumentTypeError: named argument, rule and value.

    Example:
        >>> from torch_geometric.nn import GraphSAGE
        >>> model = GraphSAGE(16, 32, num_layers=2, out_channels=4)
        >>> def compute(batch):
        ...     out = model(batch.x, batch.edge_index, num_sampled_nodes_per_hop=batch.num_sampled_nodes,
        ...                 num_sampled_edges_per_hop=batch.num_sampled_edges)
        ...     return torch.nn.functional.cross_entropy(out[: batch.batch_size], batch.y[: batch.batch_size])
        >>> GraphedStep(model, compute, torch.optim.Adam(model.parameters()))  # `loss = step(batch)` trains
        GraphedStep(GraphSAGE, Adam, replayed=0, ordinary=0)
    """

    def __init__(self, model: torch.nn.Module, compute: Callable[[Any], Tensor], optimizer: torch.optim.Optimizer, *,
                 names: Sequence[str] | None = None, warm_up: int = 8, margin: float = 0.02,
                 spared: int | None = None) -> None:  # fmt: skip
        if not callable(compute):
            raise ArgumentTypeError(f"compute must be callable, got {compute!r}")
        if not callable(getattr(optimizer, "step", None)):
            raise ArgumentTypeError(f"optimizer must have step, as torch's, got {type(optimizer).__name__}")
        check_optimizes(optimizer, model)
        if names is not None and (isinstance(names, str) or not all(isinstance(name, str) for name in names)):
            raise ArgumentTypeError(f"names must be a list of names of attributes, or None, got {names!r}")
        if warm_up < 1:
            raise ArgumentError(f"warm_up must be at least 1, got {warm_up}")
        if not 0 <= margin <= 1:
            raise ArgumentError(f"margin must lie in [0, 1], got {margin}")
        if spared is not None and spared < 0:
            raise ArgumentError(f"spared must be at least 0 or None, got {spared}")
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            raise ArgumentError("model must be of one process, got DistributedDataParallel")
        found = find_other_norm(model)
        if found is not None:
            raise ArgumentError(f"model must have no norm over all nodes, got {found}")
        self.model, self.compute, self.optimizer = model, compute, optimizer
        self._names, self._warm_up, self._margin, self._spared = names, warm_up, margin, spared
        self.replayed = self.ordinary = 0
        self.reason: str | None = None
        self._largest: Sizes | GraphSizes | None = None
        self._seen = self._missed = 0
        self._padded: PaddedBatch | PaddedGraphs | None = None
        self._recorded = RecordedStep()

    @one_line
    def __repr__(self) -> Iterator[str]:
        yield type(self.model).__name__
        yield type(self.optimizer).__name__
        yield from (f"replayed={self.replayed}", f"ordinary={self.ordinary}", *show_options(reason=self.reason))

    def __call__(self, batch: Any) -> Tensor:
        """Train on a batch; return its loss, without a gradient."""
        if (self._recorded.graph is None or self._padded is None
                or not self._padded.fill(batch, is_replayed=True)):  # fmt: skip
            self._note(batch)
            return self._step(batch)
        self.replayed, self._missed = self.replayed + 1, 0
        loss = self._recorded.replay()
        if not self._steps_inside():
            self.optimizer.step()
        return loss.clone()

    def _step(self, batch: Any) -> Tensor:
        """Run an ordinary step."""
        self.ordinary += 1
        forget_gradients(self.model, self.optimizer)
        with ordinary_passes:
            loss = self.compute(batch)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _note(self, batch: Any) -> None:
        """Learn the size of a batch that is an ordinary step, and record once enough are known."""
        sizes: Any = read_sizes(batch) or read_graph_sizes(batch)
        if sizes is None or self.reason is not None or _device_of(batch).type != "cuda":
            return
        varying = self._padded.find_varying(batch) if isinstance(self._padded, PaddedGraphs) else None
        if varying is not None:
            self._recorded.drop()
            self._refuse(f"rows of {varying!r} are neither of nodes nor of edges, and differ from batch to batch")
            return
        largest: Any = self._largest
        self._largest = largest.join(sizes) if largest is not None and largest.is_like(sizes) else sizes
        self._seen += 1
        self._missed += 1
        if self._seen > self._warm_up if self._recorded.graph is None else self._missed >= _MISSES:
            self._record(batch)

    def _record(self, batch: Any) -> None:
        assert self._largest is not None, "no batch was seen"
        self._recorded.drop()
        self._padded, self._missed = None, 0
        names = self._names
        found = None if isinstance(self._largest, GraphSizes) else find_norm_over_nodes(self.model)
        if found is not None:
            self._refuse(f"norms over all nodes of a sampled batch would read padding, as {found}")
            return
        if names is None and not isinstance(self._largest, GraphSizes):
            names = [name for name in _NAMES if any(isinstance(part._mapping.get(name), Tensor)
                                                    for part in batch.stores)]  # fmt: skip
        if isinstance(self._largest, GraphSizes):
            self._padded = PaddedGraphs(batch, self._largest, self._margin, names)
        else:
            self._padded = PaddedBatch(batch, self._largest, self._margin, names or ())
        if not self._padded.fill(batch):
            self._padded = None
            return
        forget_gradients(self.model, self.optimizer)
        own = _list_parameters(self.model, self.optimizer)
        try:
            # The trial is no step: running means of norms stay as they are.
            with left_as_it_was(self.model, _device_of(batch)):
                of_graphs = isinstance(self._padded, PaddedGraphs)
                reason = find_wait(self._try, Exception if of_graphs else RuntimeError)
                if any(part.grad is not None and part.grad.is_sparse for part in own):
                    # An optimizer of rows would also train the rows of padding.
                    reason = reason or "gradients are sparse"
                if reason is None and of_graphs:
                    reason = self._find_difference(batch)
        finally:
            forget_gradients(self.model, self.optimizer)
        if reason is not None:
            self._refuse(reason)
            return
        # Values computed from its edges must be computed within the graph.
        self._padded.fill(batch)
        recorder = Recorder(_device_of(batch), self._spared)
        self._recorded.record(recorder, self._compute, self.model, self.optimizer, self._steps_inside)

    def _try(self) -> None:
        """Run a step without the optimizer.

        Raises:
            RuntimeError: others than model and optimizer have parameters that learn, whose gradients nobody would set.
        """
        loss = self._compute()
        if not leads_to([loss], _list_parameters(self.model, self.optimizer)):
            raise RuntimeError("compute reads parameters that neither model nor optimizer has")
        loss.backward()

    def _find_difference(self, batch: Any) -> str | None:
        """Return why the loss of the batch in the places is not the loss of the batch, in evaluation; None if it is."""
        for part in self.model.modules():
            part.training = False
        try:
            with torch.no_grad(), ordinary_passes:
                expected, found = self.compute(batch).double(), self._compute().double()
        except Exception as error:  # Any error of a model in evaluation.
            return describe(error)
        bound = _APART_IF_NARROW if torch.is_autocast_enabled(expected.device.type) else _APART
        if bool((found - expected).abs() <= bound * expected.abs()):
            return None
        return ("the loss of a padded batch is another: it must use the first len(batch.y) graphs, as the last one "
                "holds the padding")  # fmt: skip

    def _refuse(self, reason: str) -> None:
        self.reason, self._padded = reason, None
        warn(f"steps are not replayed as a CUDA graph: {reason}", RuntimeWarning)

    def _compute(self) -> Tensor:
        """Compute the loss of the batch in the places."""
        assert self._padded is not None, "no places are made"
        with masked_norms(self.model, getattr(self._padded, "masks", None)), ordinary_passes:
            return self.compute(self._padded.data)

    def _steps_inside(self) -> bool:
        return steps_on_gpu(self.optimizer)


def _device_of(batch: Any) -> torch.device:
    """Return the device of a batch's edges."""
    stores = batch.stores if isinstance(batch, Data) else batch.edge_stores
    device: torch.device = stores[0]._mapping["edge_index"].device
    return device
