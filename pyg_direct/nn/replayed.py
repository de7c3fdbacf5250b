"""A model whose passes forward and backward a GPU replays as CUDA graphs, within a training loop that stays as it is.

`GraphedStep` replays whole steps, which a loop must call; this is for the loops that there are.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.modules import module as modules
from torch_geometric.nn import MessagePassing

from pyg_direct.errors import ArgumentError, warn
from pyg_direct.nn.norms import find_norm_over_nodes
from pyg_direct.nn.padded import PaddedEdges, Sizes, copy_hops
from pyg_direct.nn.propagate import is_ordinary
from pyg_direct.nn.sorted import find_batch
from pyg_direct.nn.trimmed import has_hooks
from pyg_direct.runtime.recording import Recorder, find_wait

# Ordinary passes before one is recorded, batches in a row of those that found no room after which there is made more,
# and how much larger batches may be than those seen.
_WARM_UP = 8
_MISSES = 4
_MARGIN = 0.02


class _Call(NamedTuple):
    """What a model is called with.

    Attributes:
        kind: What must be the same for passes that are recorded once.
        sizes: Nodes and edges of each hop of the batch.
        rows: Tensors of rows by the place of the argument.
    """

    kind: tuple[Any, ...]
    sizes: Sizes
    edge_index: Tensor
    rows: dict[int, Tensor]


class Replay:
    """Replays a model's passes; `accelerate(model, replay=True)` attaches one.

    Attributes:
        replayed, ordinary: Training passes of both kinds so far.
        reason: Why none is replayed, None where they may be.
    """

    def __init__(self) -> None:
        self.replayed = self.ordinary = 0
        self.reason: str | None = None
        self._kind: tuple[Any, ...] | None = None
        self._largest: Sizes | None = None
        self._seen = self._missed = 0
        self._recording: _Recording | None = None

    def __reduce__(self) -> Any:
        # Graphs belong to the memory of one model: copies record their own.
        return Replay, ()

    def __deepcopy__(self, memo: Any) -> Replay:
        return Replay()

    def __repr__(self) -> str:
        reason = "" if self.reason is None else f", reason={self.reason!r}"
        return f"Replay(replayed={self.replayed}, ordinary={self.ordinary}{reason})"

    def run(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the model gives for its arguments."""
        plain = type(model).forward
        if not (model.training and torch.is_grad_enabled() and is_ordinary()):
            return plain(model, *args, **kwargs)
        call = _read(model, args, kwargs) if self.reason is None else None
        if call is None:
            self.ordinary += 1
            return plain(model, *args, **kwargs)
        recording = self._recording
        if recording is not None and call.kind == self._kind:
            # What a pass keeps for its way back lies where that of the next would.
            if recording.is_busy():
                self.ordinary += 1
                return plain(model, *args, **kwargs)
            if recording.fill(call):
                self.replayed, self._missed = self.replayed + 1, 0
                return recording.replay(call.sizes)
        self.ordinary += 1
        self._note(model, args, kwargs, call)
        return plain(model, *args, **kwargs)

    def _note(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: _Call) -> None:
        """Learn the size of a batch, and record once enough are known."""
        if call.kind != self._kind:
            self._kind, self._largest, self._recording = call.kind, None, None
            self._seen = self._missed = 0
        self._largest = call.sizes if self._largest is None else self._largest.join(call.sizes)
        self._seen += 1
        self._missed += 1
        if self._seen > _WARM_UP if self._recording is None else self._missed >= _MISSES:
            # The memory of an earlier one serves the next.
            self._recording, self._missed = None, 0
            made = _Recording(model, args, kwargs, call, self._largest)
            # A small one leaves over more than finds room; the next may not.
            if not made.fill(call):
                return
            self.reason = made.record(call)
            if self.reason is None:
                self._recording = made
            else:
                warn(f"passes of the model are not replayed as CUDA graphs: {self.reason}", RuntimeWarning)


def attach(model: torch.nn.Module) -> Replay:
    """Let a model replay its passes.

    Raises:
        ArgumentError: a norm looks at all nodes, or the model has a `forward` of its own already.
    """
    found = find_norm_over_nodes(model)
    if found is not None:
        raise ArgumentError(f"model must have no norm over all nodes to be replayed, got {found}")
    if "forward" in model.__dict__:
        raise ArgumentError("model must be one that holds convolutions to be replayed, and not have a forward that was "
                            f"replaced, got {type(model).__name__}")  # fmt: skip
    model.__dict__["_replay"] = replay = Replay()
    model.__dict__["forward"] = MethodType(forward, model)
    return replay


def detach(model: torch.nn.Module) -> None:
    """The opposite of `attach`."""
    if getattr(model.__dict__.get("forward"), "__func__", None) is forward:
        del model.__dict__["forward"]
    # Without a `forward` it comes out of a pickle.
    model.__dict__.pop("_replay", None)


# Not for TorchScript, which takes that of the class.
@torch.jit.unused
def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """What replaces `forward` of a model that is replayed."""
    return self._replay.run(self, args, kwargs)


def _can_record(device: torch.device) -> bool:
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def _read(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
    """What a model is called with; None where a pass must be an ordinary one."""
    values = [*args, *kwargs.values()]
    found = [(place, known) for place, value in enumerate(values)
             if isinstance(value, Tensor) and (known := find_batch(value)) is not None]  # fmt: skip
    if len(found) != 1:
        return None
    edges_at, known = found[0]
    edge_index = values[edges_at]
    sizes = known.read_hops(edge_index)
    if sizes is None or not _can_record(edge_index.device):
        return None
    state = _read_state(model)
    if state is None:
        return None
    num_nodes, num_edges, rows = sum(sizes[0]), sum(sizes[1]), {}
    kinds: list[Any] = [len(args), *kwargs, len(sizes[1]), known.max_degree, edge_index.device, edge_index.dtype]
    for place, value in enumerate(values):
        if place == edges_at:
            kinds.append("edge_index")
        elif isinstance(value, Tensor):
            count = value.shape[0] if value.dim() > 0 else -1
            if (
                type(value) is not Tensor
                or value.layout is not torch.strided
                or value.requires_grad
                or value.device != edge_index.device
                or num_nodes == num_edges
                or count not in (num_nodes, num_edges)
            ):
                return None
            rows[place] = value
            kinds.append(("nodes" if count == num_nodes else "edges", value.dtype, value.shape[1:]))
        elif isinstance(value, (list, tuple)):
            if list(value) not in ([*sizes[0]], [*sizes[1]]):
                return None
            kinds.append("nodes of hops" if len(value) == len(sizes[0]) else "edges of hops")
        elif value is None or isinstance(value, (bool, int, float, str)):
            kinds.append((type(value), value))
        else:
            return None
    return _Call((*kinds, *state), Sizes(*sizes), edge_index, rows)


def _read_state(model: Any) -> tuple[Any, ...] | None:
    """Of a model and of torch, what recorded passes depend on; None where something looks at what modules give."""
    state: list[Any] = [torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"),
                        torch.are_deterministic_algorithms_enabled()]  # fmt: skip
    for part in model.modules():
        # Those of the model itself are called around its `forward`.
        if (part is not model and has_hooks(part)) or (isinstance(part, MessagePassing) and _is_watched(part)):
            return None
        state += [id(part), part.training]
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None:
                if tensor._backward_hooks:
                    return None
                state += [tensor.data_ptr(), tensor.requires_grad]
    # The second are what torch calls for each operation.
    if modules._has_any_global_hook() or torch._C._len_torch_dispatch_stack() > 0:
        return None
    return tuple(state)


def _is_watched(part: MessagePassing) -> bool:
    """Whether something looks at the messages of a convolution."""
    return bool(part.explain or part._propagate_forward_pre_hooks or part._propagate_forward_hooks
                or part._message_forward_pre_hooks or part._message_forward_hooks or part._aggregate_forward_pre_hooks
                or part._aggregate_forward_hooks or part._edge_update_forward_pre_hooks
                or part._edge_update_forward_hooks)  # fmt: skip


class _Recording:
    """Passes of a model over places of fixed size."""

    def __init__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: _Call, largest: Sizes) -> None:
        known = find_batch(call.edge_index)
        assert known is not None, "read before"
        self._edges = PaddedEdges(call.edge_index, largest, _MARGIN, largest.nodes[0], known.max_degree)
        self._rows: dict[int, Tensor] = {}
        self._of_edges = {place: rows.shape[0] == sum(call.sizes.edges) for place, rows in call.rows.items()}
        values: list[Any] = [*args, *kwargs.values()]
        for place, value in enumerate(values):
            if place in call.rows:
                count = sum(self._hops(place, self._edges.places))
                self._rows[place] = values[place] = value.new_zeros(count, *value.shape[1:])
            elif isinstance(value, Tensor):
                values[place] = self._edges.edge_index
            elif isinstance(value, (list, tuple)):
                values[place] = list(self._edges.places[len(value) != len(largest.nodes)])
        self._args, self._kwargs = values[: len(args)], dict(zip(kwargs, values[len(args) :], strict=True))
        # Not the module, which holds this: a cycle would keep memory of the GPU until it is found.
        self._model = weakref.ref(model)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._made: Tensor | None = None
        self._out: Tensor | None = None
        self._grad: Tensor | None = None
        self._gradients: list[Tensor | None] = []
        self._flat: Tensor | None = None
        self._num_hops = 0
        self._turn: weakref.ref[_Turn] | None = None
        self._graphs: tuple[Any, Any] | None = None

    def _hops(self, place: int, sizes: Sizes) -> tuple[int, ...]:
        return sizes.edges if self._of_edges[place] else sizes.nodes

    def is_busy(self) -> bool:
        """Whether a pass forward may still go back."""
        return self._turn is not None and self._turn() is not None

    def fill(self, call: _Call) -> bool:
        """Take a batch over; False where it finds no room."""
        if not self._edges.fill(call.edge_index, call.sizes):
            return False
        for place, rows in call.rows.items():
            copy_hops(rows.detach(), self._rows[place], self._hops(place, call.sizes),
                      self._hops(place, self._edges.places))  # fmt: skip
        return True

    def record(self, call: _Call) -> str | None:
        """Record both passes over a batch that was taken over; why they cannot be, else None."""
        if not self._parameters:
            return "no parameter has a gradient"
        self._edges.register()
        # Also what a model asks of its arguments, which are others here.
        reason = find_wait(self._run, Exception) or self._find_misfit() or find_wait(self._return, Exception)
        if reason is None and any(part is not None and part.layout is not torch.strided for part in self._gradients):
            reason = "gradients are sparse"
        self._gradients, self._flat = [], None
        if reason is not None:
            self._made = None
            return reason
        # What was computed of its edges must be computed within the graph.
        self._edges.register()
        recorder = Recorder(call.edge_index.device)
        forward = recorder.record(self._run)
        assert self._made is not None, "the model ran"
        self._out = self._made.detach()
        self._graphs = forward, recorder.record(self._return)
        self._made = None
        return None

    def _run(self) -> None:
        model: Any = self._model()
        self._made = type(model).forward(model, *self._args, **self._kwargs)

    def _find_misfit(self) -> str | None:
        """Why what the model gave cannot be cut to a batch; None where it can."""
        made: Any = self._made
        if not isinstance(made, Tensor) or made.dim() == 0 or not made.requires_grad:
            return f"the model gives {type(made).__name__} without a gradient or without rows of nodes"
        nodes = self._edges.places.nodes
        ends = {sum(nodes[: hop + 1]): hop + 1 for hop in reversed(range(len(nodes)))}
        if made.shape[0] not in ends:
            return f"the model gives {made.shape[0]} rows, which are not those of the nodes of some hops"
        self._num_hops, self._grad = ends[made.shape[0]], torch.zeros_like(made)
        return None

    def _return(self) -> None:
        """Back from what the last `_run` made."""
        assert self._made is not None, "the model ran"
        # As outside of a caller's autocast, where a loop goes back.
        with torch.autocast(self._made.device.type, enabled=False):
            found = torch.autograd.grad(self._made, self._parameters, self._grad, allow_unused=True)
        dense = [part for part in found if part is not None and part.layout is torch.strided]
        self._gradients = list(found)
        if dense and all(part.dtype == dense[0].dtype for part in dense):
            # Handed over by one copy.
            self._flat = torch.cat([part.reshape(-1) for part in dense])

    def replay(self, sizes: Sizes) -> Tensor:
        """What the model gives for the batch that was taken over."""
        out: Tensor = _Replayed.apply(self, sizes.nodes[: self._num_hops], *self._parameters)
        return out

    def go_forth(self, counts: Sequence[int]) -> tuple[Tensor, _Turn]:
        """Results of so many nodes of each hop, in memory of their own."""
        assert self._graphs is not None, "recorded"
        assert self._out is not None, "recorded"
        self._graphs[0].replay()
        turn = _Turn()
        self._turn = weakref.ref(turn)
        first, parts = 0, []
        for count, room in zip(counts, self._edges.places.nodes, strict=False):
            parts.append(self._out.narrow(0, first, count))
            first += room
        return (parts[0].clone() if len(parts) == 1 else torch.cat(parts)), turn

    def go_back(self, turn: _Turn, grad: Tensor, counts: Sequence[int]) -> list[Tensor | None]:
        """Gradients of the parameters, in memory of their own."""
        if self._turn is None or self._turn() is not turn:
            raise RuntimeError("a replayed pass goes back once; call accelerate(model) without replay to use "
                               "retain_graph")  # fmt: skip
        assert self._graphs is not None, "recorded"
        assert self._grad is not None, "recorded"
        self._turn = None
        # Nodes that fill places left over get none.
        self._grad.zero_()
        copy_hops(grad, self._grad, counts, self._edges.places.nodes[: len(counts)])
        self._graphs[1].replay()
        if self._flat is None:
            return [None if part is None else part.clone() for part in self._gradients]
        sizes = [part.numel() for part in self._gradients if part is not None]
        flat = iter(self._flat.clone().split(sizes))
        return [None if part is None else next(flat).view(part.shape) for part in self._gradients]


class _Turn:
    """One pass forward, alive as long as it may go back."""


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recording: _Recording, counts: Sequence[int], *parameters: Tensor) -> Tensor:
        out, ctx.turn = recording.go_forth(counts)
        ctx.recording, ctx.counts = recording, counts
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.recording.go_back(ctx.turn, grad, ctx.counts)
