"""Passes of a model, forward and backward, recorded as CUDA graphs over places for batches of up to some size."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyg_direct.nn.padded import PaddedEdges, Sizes, copy_hops
from pyg_direct.nn.sorted import find_batch
from pyg_direct.runtime.recording import Recorder, find_wait

# How much larger batches may be than those seen.
_MARGIN = 0.02


class Call(NamedTuple):
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


@contextmanager
def _own_leaves(model: torch.nn.Module, parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters of a model stand aside for others of the same memory, which no graph of the caller's leads to."""
    others = {id(parameter): torch.nn.Parameter(parameter.detach()) for parameter in parameters}
    places = [(part, name, parameter) for part in model.modules() for name, parameter in part._parameters.items()
              if id(parameter) in others]  # fmt: skip
    try:
        for part, name, parameter in places:
            # Layers such as LSTM note them in lists of their own.
            setattr(part, name, others[id(parameter)])
        yield list(others.values())
    finally:
        for part, name, parameter in places:
            setattr(part, name, parameter)


def _leads_to(made: Tensor, leaves: Sequence[Tensor]) -> bool:
    """Whether gradients of what a model made go to these leaves and to nothing else."""
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
                self._rows[place] = values[place] = value.new_zeros(count, *value.shape[1:])
            elif isinstance(value, Tensor):
                values[place] = self._edges.edge_index
            elif isinstance(value, (list, tuple)):
                values[place] = list(self._edges.places[len(value) != len(largest.nodes)])
        self._args, self._kwargs = values[: len(args)], dict(zip(kwargs, values[len(args) :], strict=True))
        # Not the module, which holds this: a cycle would keep memory of the GPU until it is found.
        self._model = weakref.ref(model)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._leaves: list[Tensor] = []
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

    def fill(self, call: Call) -> bool:
        """Take a batch over; False where it finds no room."""
        if not self._edges.fill(call.edge_index, call.sizes):
            return False
        for place, rows in call.rows.items():
            copy_hops(rows.detach(), self._rows[place], self._hops(place, call.sizes),
                      self._hops(place, self._edges.places))  # fmt: skip
        return True

    def record(self, call: Call) -> str | None:
        """Record both passes over a batch that was taken over; why they cannot be, else None."""
        if not self._parameters:
            return "no parameter has a gradient"
        if any(type(parameter) is not torch.nn.Parameter for parameter in self._parameters):
            return "a parameter is of a class of its own"
        model: Any = self._model()
        self._edges.register()
        with _own_leaves(model, self._parameters) as self._leaves:
            # Also what a model asks of its arguments, which are others here.
            reason = find_wait(self._run, Exception) or self._find_misfit() or find_wait(self._return, Exception)
        if reason is None and any(part is not None and part.layout is not torch.strided for part in self._gradients):
            reason = "gradients are sparse"
        self._made, self._gradients, self._flat = None, [], None
        if reason is not None:
            return reason
        # What was computed of its edges must be computed within the graph.
        self._edges.register()
        recorder = Recorder(call.edge_index.device)
        # Others than before: torch adds up a leaf's gradients where a graph that still lives met it first.
        with _own_leaves(model, self._parameters) as self._leaves:
            forward = recorder.record(self._run)
            assert self._made is not None, "the model ran"
            self._out = self._made.detach()
            self._graphs = forward, recorder.record(self._return)
        self._made, self._leaves = None, []
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
        if not _leads_to(made, self._leaves):
            return "gradients are asked for by what is no parameter of the model"
        self._num_hops, self._grad = ends[made.shape[0]], torch.zeros_like(made)
        return None

    def _return(self) -> None:
        """Back from what the last `_run` made."""
        assert self._made is not None, "the model ran"
        # As outside of a caller's autocast, where a loop goes back.
        with torch.autocast(self._made.device.type, enabled=False):
            found = torch.autograd.grad(self._made, self._leaves, self._grad, allow_unused=True)
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
    def forward(ctx: Any, recording: RecordedPasses, counts: Sequence[int], *parameters: Tensor) -> Tensor:
        out, ctx.turn = recording.go_forth(counts)
        ctx.recording, ctx.counts = recording, counts
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.recording.go_back(ctx.turn, grad, ctx.counts)
