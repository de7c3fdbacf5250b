"""Passes of a model, forward and backward, recorded as CUDA graphs over places for batches of up to some size."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pyg_direct.nn.call import Call, list_tensors
from pyg_direct.nn.norms import find_norm_over_nodes
from pyg_direct.nn.padded import PaddedEdges, Sizes, copy_hops
from pyg_direct.nn.sorted import find_batch
from pyg_direct.nn.trial import Traces, left_as_it_was
from pyg_direct.runtime.recording import Recorder, find_wait

# How much larger batches may be than those seen.
_MARGIN = 0.02
# Times the numbers of a node that rows left over are given for a look at whether others see them, and how far results
# may be apart then, of float32 and of what is narrower.
_LOUD = 100
_APART, _APART_IF_NARROW = 1e-3, 3e-2


@contextmanager
def _own_leaves(model: torch.nn.Module, parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters of a model stand aside for others of the same memory, which no graph of the caller's leads to."""
    others = {id(parameter): torch.nn.Parameter(parameter.detach()) for parameter in parameters}
    places = [(part, name, parameter) for part in model.modules() for name, parameter in part._parameters.items()
              if id(parameter) in others]  # fmt: skip
    # Layers such as LSTM note their parameters in lists of their own, and move what they find to be others.
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
                # What is left over holds what a model is made for.
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
        """Whether a pass forward may still go back."""
        return self._turn is not None and self._turn() is not None

    def wait(self) -> None:
        """Until the GPU has done with its memory."""
        if self._edges.edge_index.is_cuda:
            torch.cuda.synchronize(self._edges.edge_index.device)

    def fill(self, call: Call) -> bool:
        """Take a batch over; False where it finds no room."""
        if not self._edges.fill(call.edge_index, call.sizes):
            return False
        for place, rows in call.rows.items():
            copy_hops(rows.detach(), self._rows[place], self._hops(place, call.sizes),
                      self._hops(place, self._edges.places))  # fmt: skip
        return True

    def record(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Record both passes over a batch that was taken over; why they cannot be, else None.

        Args:
            args, kwargs: What the model is called with for that batch.
        """
        model: Any = self._model()
        reason = self._find_reason(model, call, args, kwargs)
        self._made, self._gradients, self._flat, self._shapes = None, [], None, []
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

    def _find_reason(self, model: Any, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Why passes cannot be recorded, or would do something else than ordinary ones; None where neither is so."""
        if not self._parameters:
            return "no parameter has a gradient"
        found = find_norm_over_nodes(model)
        if found is not None:
            return f"the model has a norm over all nodes, {found}"
        given = [*self._rows.values(), self._edges.edge_index]
        self._edges.register()
        with _own_leaves(model, self._parameters) as self._leaves, left_as_it_was(model, call.edge_index.device):
            traces = Traces(model, given)
            # Also what a model asks of its arguments, which are others here.
            return (find_wait(self._run, Exception) or traces.find() or self._find_misfit()
                    or find_wait(self._return, Exception) or self._find_odd_gradient()
                    or self._find_mixture(model, call, args, kwargs))  # fmt: skip

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

    def _find_odd_gradient(self) -> str | None:
        """Why gradients cannot be handed over; None where they can."""
        dense = [part for part in self._gradients if part is not None]
        if any(part.layout is not torch.strided for part in dense):
            return "gradients are sparse"
        # Rows that have no gradient give none to the parameters.
        if not all(bool(part.isfinite().all()) for part in dense):
            return "gradients of rows left over are not numbers"
        return None

    def _find_mixture(self, model: Any, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Why rows of nodes are others than those of the batch itself, evaluated; None where they are not."""
        for part in model.modules():
            part.training = False
        self._made = None
        try:
            with torch.no_grad():
                expected = type(model).forward(model, *args, **kwargs)
                self._fill_up(call, _LOUD)
                self._run()
                found = torch.cat(self._cut(self._made, call.sizes.nodes[: self._num_hops]))
        except Exception as error:  # Whatever a model asks of its arguments.
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
        """Give rows left over the numbers of the batch's first, so many times."""
        for place, rows in call.rows.items():
            first, begin = rows.detach()[:1], 0
            if rows.is_floating_point():
                first = first * factor
            for count, room in zip(self._hops(place, call.sizes), self._hops(place, self._edges.places), strict=True):
                if count < room and len(first):
                    self._rows[place].narrow(0, begin + count, room - count).copy_(first)
                begin += room

    def _cut(self, rows: Any, counts: Sequence[int]) -> list[Tensor]:
        """Of rows in their places those of a batch."""
        parts, begin = [], 0
        for count, room in zip(counts, self._edges.places.nodes, strict=False):
            parts.append(rows.narrow(0, begin, count))
            begin += room
        return parts

    def _return(self) -> None:
        """Back from what the last `_run` made."""
        assert self._made is not None, "the model ran"
        # As outside of a caller's autocast, where a loop goes back.
        with torch.autocast(self._made.device.type, enabled=False):
            found = torch.autograd.grad(self._made, self._leaves, self._grad, allow_unused=True)
        dense = [part for part in found if part is not None and part.layout is torch.strided]
        self._gradients, self._shapes = list(found), [None if part is None else part.shape for part in found]
        if self._graphs is None and self._out is None:
            # A trial, whose gradients are looked at.
            return
        if dense and all(part.dtype == dense[0].dtype for part in dense):
            # Handed over by one copy.
            self._flat, self._gradients = torch.cat([part.reshape(-1) for part in dense]), []

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
        parts = self._cut(self._out, counts)
        return (parts[0].clone() if len(parts) == 1 else torch.cat(parts)), turn

    def go_back(self, turn: _Turn, grad: Tensor, counts: Sequence[int]) -> list[Tensor | None]:
        """Gradients of the parameters, in memory of their own."""
        assert self._turn is not None, "no other came in between"
        assert self._turn() is turn, "no other came in between"
        assert self._graphs is not None, "recorded"
        assert self._grad is not None, "recorded"
        self._turn = None
        # Nodes that fill places left over get none.
        self._grad.zero_()
        copy_hops(grad, self._grad, counts, self._edges.places.nodes[: len(counts)])
        self._graphs[1].replay()
        if self._flat is None:
            return [None if part is None else part.clone() for part in self._gradients]
        sizes = [shape.numel() for shape in self._shapes if shape is not None]
        flat = iter(self._flat.clone().split(sizes))
        return [None if shape is None else next(flat).view(shape) for shape in self._shapes]


class _Turn:
    """One pass forward, alive as long as it may go back."""


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
        # A loss that is kept holds no memory of graphs.
        ctx.recording = ctx.turn = None
        return None, None, *recording.go_back(turn, grad, ctx.counts)
