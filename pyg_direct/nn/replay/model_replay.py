"""CUDA graphs of a model's forward and backward passes, replayed within an unchanged training loop.

`RecordedPasses` records passes over places for batches of up to some size. `Replay` replays them for a model. A loop
must call `GraphedStep` to replay whole steps; this module serves existing loops.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch_geometric.nn import MessagePassing

from pyg_direct.errors import ArgumentError, warn
from pyg_direct.nn.module_state import attach, detach, is_attached
from pyg_direct.nn.replay.guards import Call, Traces, find_norm_over_nodes, left_as_it_was, list_tensors, read_call
from pyg_direct.nn.replay.padded_batch import PaddedEdges, Sizes, copy_hops
from pyg_direct.nn.sorted_edges import find_batch
from pyg_direct.object_text import one_line, show_options
from pyg_direct.ops.run_kernel import is_ordinary
from pyg_direct.runtime.cuda.graph_capture import Recorder, find_wait

# How much larger than the seen batches batches may be.
_MARGIN = 0.02
# Factor of a node's numbers in padding rows, for a test whether others read them. Then the allowed difference of
# results, for float32 and for narrower dtypes.
_LOUD = 100
_APART, _APART_IF_NARROW = 1e-3, 3e-2


@contextmanager
def _own_leaves(model: torch.nn.Module, parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Replace parameters of a model by others of the same memory, which no graph of the caller leads to."""
    others = {id(parameter): torch.nn.Parameter(parameter.detach()) for parameter in parameters}
    places = [(part, name, parameter) for part in model.modules() for name, parameter in part._parameters.items()
              if id(parameter) in others]  # fmt: skip
    # Layers such as LSTM keep lists of their parameters, and move parameters that have changed.
    recurrent = [part for part in model.modules() if isinstance(part, torch.nn.RNNBase)]
    noted = [(part, part._flat_weight_refs) for part in recurrent]
    try:
        for part, name, parameter in places:
            setattr(part, name, others[id(parameter)])
        for part in recurrent:
            part._flat_weight_refs = [None if weight is None else weakref.ref(weight) for weight in part._flat_weights]
        yield list(others.values())
    finally:
        for part, name, parameter in places:
            setattr(part, name, parameter)
        for part, references in noted:
            part._flat_weight_refs = references


def _leads_to(made: Tensor, leaves: Sequence[Tensor]) -> bool:
    """Report whether gradients of a model's results go to these leaves and to no others."""
    known, seen, nodes = {id(leaf) for leaf in leaves}, set(), [made.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in known:
            return False
        nodes += [following for following, _ in node.next_functions]
    return True


class RecordedPasses:
    """Passes of a model over places of fixed size."""

    def __init__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call, largest: Sizes) -> None:
        known = find_batch(call.edge_index)
        assert known is not None, "read before"
        self._edges = PaddedEdges(call.edge_index, largest, _MARGIN, largest.nodes[0], known.max_degree)
        self._rows: dict[int, Tensor] = {}
        self._of_edges = {place: rows.shape[0] == sum(call.sizes.edges) for place, rows in call.rows.items()}
        values: list[Any] = [*args, *kwargs.values()]
        for place, value in enumerate(values):
            if place in call.rows:
                count = sum(self._hops(place, self._edges.places))
                # Padding holds values that a model is made for.
                self._rows[place] = values[place] = value.detach()[:1].expand(count, *value.shape[1:]).clone()
            elif isinstance(value, Tensor):
                values[place] = self._edges.edge_index
            elif isinstance(value, (list, tuple)):
                values[place] = list(self._edges.places[len(value) != len(largest.nodes)])
        self._args, self._kwargs = values[: len(args)], dict(zip(kwargs, values[len(args) :], strict=True))
        # The module holds this.
        self._model = weakref.ref(model)
        self._held = list_tensors(model)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._leaves: list[Tensor] = []
        self._made: Tensor | None = None
        self._out: Tensor | None = None
        self._grad: Tensor | None = None
        self._gradients: list[Tensor | None] = []
        self._flat: Tensor | None = None
        self._shapes: list[torch.Size | None] = []
        self._num_hops = 0
        self._turn: weakref.ref[_Turn] | None = None
        self._graphs: tuple[Any, Any] | None = None

    def _hops(self, place: int, sizes: Sizes) -> tuple[int, ...]:
        return sizes.edges if self._of_edges[place] else sizes.nodes

    def is_busy(self) -> bool:
        """Report whether a forward pass may still run backward."""
        return self._turn is not None and self._turn() is not None

    def wait(self) -> None:
        """Wait until the GPU has finished with its memory."""
        if self._edges.edge_index.is_cuda:
            torch.cuda.synchronize(self._edges.edge_index.device)

    def fill(self, call: Call) -> bool:
        """Copy a batch; False if it does not fit."""
        if not self._edges.fill(call.edge_index, call.sizes):
            return False
        for place, rows in call.rows.items():
            copy_hops(rows.detach(), self._rows[place], self._hops(place, call.sizes),
                      self._hops(place, self._edges.places))  # fmt: skip
        return True

    def record(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Record both passes over a copied batch; return why they cannot be recorded, otherwise None.

        Args:
            args, kwargs: Arguments of the model for that batch.
        """
        model: Any = self._model()
        reason = self._find_reason(model, call, args, kwargs)
        self._made, self._gradients, self._flat, self._shapes = None, [], None, []
        if reason is not None:
            return reason
        # Values computed from its edges must be computed within the graph.
        self._edges.register()
        recorder = Recorder(call.edge_index.device)
        # New leaves: torch adds up a leaf's gradients on the stream of the living graph that met it first.
        with _own_leaves(model, self._parameters) as self._leaves:
            forward = recorder.record(self._run)
            assert self._made is not None, "the model ran"
            self._out = self._made.detach()
            self._graphs = forward, recorder.record(self._return)
        self._made, self._leaves = None, []
        return None

    def _find_reason(self, model: Any, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Return why passes cannot be recorded, or would differ from ordinary ones; None if neither."""
        if not self._parameters:
            return "no parameter has a gradient"
        found = find_norm_over_nodes(model)
        if found is not None:
            return f"the model has a norm over all nodes, {found}"
        given = [*self._rows.values(), self._edges.edge_index]
        self._edges.register()
        with _own_leaves(model, self._parameters) as self._leaves, left_as_it_was(model, call.edge_index.device):
            traces = Traces(model, given)
            # Also results that depend on the model's arguments, which are others here.
            return (find_wait(self._run, Exception) or traces.find() or self._find_misfit()
                    or find_wait(self._return, Exception) or self._find_odd_gradient()
                    or self._find_mixture(model, call, args, kwargs))  # fmt: skip

    def _run(self) -> None:
        model: Any = self._model()
        self._made = type(model).forward(model, *self._args, **self._kwargs)

    def _find_misfit(self) -> str | None:
        """Return why the model's results cannot be cut to a batch; None if they can."""
        made: Any = self._made
        if not isinstance(made, Tensor) or made.dim() == 0 or not made.requires_grad:
            return f"the model gives {type(made).__name__} without a gradient or without rows of nodes"
        nodes = self._edges.places.nodes
        ends = {sum(nodes[: hop + 1]): hop + 1 for hop in reversed(range(len(nodes)))}
        if made.shape[0] not in ends:
            return f"the model gives {made.shape[0]} rows, which are not those of the nodes of some hops"
        if not _leads_to(made, self._leaves):
            return "gradients are asked for by what is no parameter of the model"
        self._num_hops, self._grad = ends[made.shape[0]], torch.zeros_like(made)
        return None

    def _find_odd_gradient(self) -> str | None:
        """Return why gradients cannot be passed on; None if they can."""
        dense = [part for part in self._gradients if part is not None]
        if any(part.layout is not torch.strided for part in dense):
            return "gradients are sparse"
        # Rows that have no gradient give none to the parameters.
        if not all(bool(part.isfinite().all()) for part in dense):
            return "gradients of rows left over are not numbers"
        return None

    def _find_mixture(self, model: Any, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Return why rows of nodes differ from those for the batch itself, in evaluation; None if they do not."""
        for part in model.modules():
            part.training = False
        self._made = None
        try:
            with torch.no_grad():
                expected = type(model).forward(model, *args, **kwargs)
                self._fill_up(call, _LOUD)
                self._run()
                found = torch.cat(self._cut(self._made, call.sizes.nodes[: self._num_hops]))
        except Exception as error:  # Any error of a model about its arguments.
            return (str(error) or type(error).__name__).splitlines()[0]
        finally:
            self._made = None
            self._fill_up(call, 1)
        if not isinstance(expected, Tensor) or expected.shape != found.shape:
            return "the model gives other rows for a batch that is filled up"
        narrow = found.dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled(found.device.type)
        is_rounded = narrow or torch.get_float32_matmul_precision() != "highest"
        apart = (found.double() - expected.double()).norm()
        if bool(apart <= (_APART_IF_NARROW if is_rounded else _APART) * expected.double().norm()):
            return None
        return "rows of nodes depend on nodes that are not their neighbors"

    def _fill_up(self, call: Call, factor: int) -> None:
        """Fill padding rows with the numbers of the batch's first rows, times a factor."""
        for place, rows in call.rows.items():
            first, begin = rows.detach()[:1], 0
            if rows.is_floating_point():
                first = first * factor
            for count, room in zip(self._hops(place, call.sizes), self._hops(place, self._edges.places), strict=True):
                if count < room and len(first):
                    self._rows[place].narrow(0, begin + count, room - count).copy_(first)
                begin += room

    def _cut(self, rows: Any, counts: Sequence[int]) -> list[Tensor]:
        """Select the rows of a batch from rows in their places."""
        parts, begin = [], 0
        for count, room in zip(counts, self._edges.places.nodes, strict=False):
            parts.append(rows.narrow(0, begin, count))
            begin += room
        return parts

    def _return(self) -> None:
        """Run backward from the results of the last `_run`."""
        assert self._made is not None, "the model ran"
        # As without a caller's autocast, which is how a loop runs backward.
        with torch.autocast(self._made.device.type, enabled=False):
            found = torch.autograd.grad(self._made, self._leaves, self._grad, allow_unused=True)
        dense = [part for part in found if part is not None and part.layout is torch.strided]
        self._gradients, self._shapes = list(found), [None if part is None else part.shape for part in found]
        if self._graphs is None and self._out is None:
            # A trial, whose gradients are checked.
            return
        if dense and all(part.dtype == dense[0].dtype for part in dense):
            # Returned by one copy.
            self._flat, self._gradients = torch.cat([part.reshape(-1) for part in dense]), []

    def replay(self, sizes: Sizes) -> Tensor:
        """Return the result of the model for the copied batch."""
        out: Tensor = _Replayed.apply(self, sizes.nodes[: self._num_hops], *self._parameters)
        return out

    def go_forth(self, counts: Sequence[int]) -> tuple[Tensor, _Turn]:
        """Return results of so many nodes of each hop, in new memory."""
        assert self._graphs is not None, "recorded"
        assert self._out is not None, "recorded"
        self._graphs[0].replay()
        turn = _Turn()
        self._turn = weakref.ref(turn)
        parts = self._cut(self._out, counts)
        return (parts[0].clone() if len(parts) == 1 else torch.cat(parts)), turn

    def go_back(self, turn: _Turn, grad: Tensor, counts: Sequence[int]) -> list[Tensor | None]:
        """Return gradients of the parameters, in new memory."""
        assert self._turn is not None, "no other came in between"
        assert self._turn() is turn, "no other came in between"
        assert self._graphs is not None, "recorded"
        assert self._grad is not None, "recorded"
        self._turn = None
        # Padding nodes get none.
        self._grad.zero_()
        copy_hops(grad, self._grad, counts, self._edges.places.nodes[: len(counts)])
        self._graphs[1].replay()
        if self._flat is None:
            return [None if part is None else part.clone() for part in self._gradients]
        sizes = [shape.numel() for shape in self._shapes if shape is not None]
        flat = iter(self._flat.clone().split(sizes))
        return [None if shape is None else next(flat).view(shape) for shape in self._shapes]


class _Turn:
    """One forward pass, alive as long as it may run backward."""


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recording: RecordedPasses, counts: Sequence[int], *parameters: Tensor) -> Tensor:
        out, ctx.turn = recording.go_forth(counts)
        ctx.recording, ctx.counts = recording, counts
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.turn is None or torch.is_grad_enabled():
            raise RuntimeError("a replayed pass goes back once and without a graph of its own; call accelerate(model) "
                               "without replay to use retain_graph or create_graph")  # fmt: skip
        recording, turn = ctx.recording, ctx.turn
        # A kept loss holds no memory of graphs.
        ctx.recording = ctx.turn = None
        return None, None, *recording.go_back(turn, grad, ctx.counts)


# Ordinary passes before one is recorded, and consecutive batches that did not fit after which the places are enlarged.
_WARM_UP = 8
_MISSES = 4
# Consecutive calls of different kinds, after which no kind is expected to repeat.
_CHANGES = 32
# Wrappers that call a model in their own way.
_SPREAD = (DataParallel, DistributedDataParallel, FullyShardedDataParallel)


class Replay:
    """Replay of a model's passes; `accelerate(model, replay=True)` attaches one.

    Attributes:
        replayed, ordinary: Training passes of both kinds so far.
        reason: Why none is replayed, None if they may be.
    """

    def __init__(self) -> None:
        self.replayed = self.ordinary = 0
        self.reason: str | None = None
        self._thread: int | None = None
        self._recording: RecordedPasses | None = None
        # For the recording, or for consecutive calls that may be recorded next.
        self._kind: tuple[Any, ...] | None = None
        self._largest: Sizes | None = None
        self._recorded: Sizes | None = None
        self._missed = 0
        self._next: tuple[Any, ...] | None = None
        self._next_largest: Sizes | None = None
        self._seen = self._changes = 0

    def __deepcopy__(self, memo: Any) -> Replay:
        # Graphs belong to the memory of one model: copies record their own.
        return Replay()

    @one_line
    def __repr__(self) -> Iterator[str]:
        yield from (f"replayed={self.replayed}", f"ordinary={self.ordinary}", *show_options(reason=self.reason))

    def run(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of the model for its arguments."""
        plain = type(model).forward
        if not (model.training and torch.is_grad_enabled() and is_ordinary()) or _is_repeated():
            return plain(model, *args, **kwargs)
        call = self._read(model, args, kwargs)
        recording = self._recording
        # The next pass would overwrite the tensors that a pass keeps for its backward.
        if call is not None and not (recording is not None and recording.is_busy()):
            if recording is not None and call.kind == self._kind and recording.fill(call):
                self.replayed, self._missed, self._next, self._changes = self.replayed + 1, 0, None, 0
                return recording.replay(call.sizes)
            self._note(model, args, kwargs, call)
        self.ordinary += 1
        return plain(model, *args, **kwargs)

    def _read(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        if self.reason is None and self._thread not in (None, threading.get_ident()):
            self._refuse("the model is called in several threads")
        self._thread = threading.get_ident()
        return read_call(model, args, kwargs) if self.reason is None else None

    def _note(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call) -> None:
        """Learn the size of a batch, and record once enough are known."""
        if self._recording is not None and call.kind == self._kind:
            assert self._largest is not None, "recorded for it"
            self._largest = self._largest.join(call.sizes)
            self._missed += 1
            if self._missed < _MISSES or self._largest == self._recorded:
                return
        else:
            if call.kind != self._next or self._next_largest is None:
                self._next, self._next_largest, self._seen = call.kind, call.sizes, 0
                self._changes += 1
                if self._changes > _CHANGES:
                    self._refuse("what the model holds, or is called with besides a batch, changes again and again")
                    return
            self._next_largest = self._next_largest.join(call.sizes)
            self._seen += 1
            if self._seen <= _WARM_UP:
                return
            self._kind, self._largest = call.kind, self._next_largest
        self._missed = 0
        try:
            reason = self._record(model, args, kwargs, call, self._largest)
        except Exception as error:  # Such as memory that runs out: the loop goes on without replay.
            reason = (str(error) or type(error).__name__).splitlines()[0]
        if reason is not None:
            self._refuse(reason)

    def _record(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call, largest: Sizes
                ) -> str | None:  # fmt: skip
        # The memory of an earlier one serves the next, once it is no longer read.
        if self._recording is not None:
            self._recording.wait()
        self._recording = None
        made = RecordedPasses(model, args, kwargs, call, largest)
        # A small batch leaves more padding than fits; the next may not.
        if not made.fill(call):
            return None
        reason = made.record(call, args, kwargs)
        if reason is None:
            self._recording, self._recorded, self._next = made, largest, None
        return reason

    def _refuse(self, reason: str) -> None:
        self.reason, self._recording = reason, None
        warn(f"passes of the model are not replayed as CUDA graphs: {reason}", RuntimeWarning)


def _is_repeated() -> bool:
    """Report whether a pass is repeated in backward, or hooks receive its saved tensors, as in checkpoints."""
    if torch._C._current_graph_task_id() != -1:
        return True
    try:
        # Refused if there are such hooks; torch 2.6 has no other way to ask.
        with torch.autograd.graph.disable_saved_tensors_hooks("hooks are in force"):
            return False
    except RuntimeError:
        return True


def check(model: torch.nn.Module) -> None:
    """Check whether a model may be replayed.

    Raises:
        ArgumentError: a norm reads all nodes, or the model is no module that holds convolutions.
    """
    found = find_norm_over_nodes(model)
    if found is not None:
        raise ArgumentError(f"model must have no norm over all nodes to be replayed, got {found}")
    method = getattr(model.__dict__.get("forward", forward), "__func__", forward)
    if isinstance(model, MessagePassing) or method not in (forward, type(model).forward):
        raise ArgumentError("model must be one that holds convolutions to be replayed, and not have a forward that was "
                            f"replaced, got {type(model).__name__}")  # fmt: skip
    spread = next((part for part in model.modules() if isinstance(part, _SPREAD)), None)
    if spread is not None:
        raise ArgumentError(f"model must be the one that {type(spread).__name__} holds to be replayed, before it is "
                            "given to that")  # fmt: skip


def watch_passes(model: torch.nn.Module) -> Replay:
    """Let a model replay its passes, after `check`."""
    replay = Replay()
    # TorchScript compiles the `forward` of the instance.
    attach(model, forward=forward, _replay=replay, __prepare_scriptable__=copy.copy)
    return replay


def forget_replay(model: torch.nn.Module) -> None:
    """Undo `watch_passes`."""
    if is_attached(model, "forward", forward):
        detach(model, "forward", "_replay", "__prepare_scriptable__")


# Not for TorchScript, which takes the method of the class.
@torch.jit.unused
def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Override `forward` of a model that is replayed."""
    return self._replay.run(self, args, kwargs)
