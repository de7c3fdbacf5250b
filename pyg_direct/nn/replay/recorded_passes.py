"""A model's forward and backward passes, recorded as CUDA graphs over places of fixed size.

`WholePasses` reads the tensors of the program in place, if these come back in each pass, and has places for the others.
`batch_passes.py` has places for batches of up to some size. All return results and gradients in new memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import compress, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch_geometric.nn import HeteroConv, HGTConv

from pyg_direct.errors import describe
from pyg_direct.nn.hetero.unread_rows import RowsOfPass
from pyg_direct.nn.replay.guards import ForeignReads, Traces, left_as_it_was, list_tensors, read_version
from pyg_direct.nn.replay.host_reads import HostReads, MaskedFills, OtherAnswersError
from pyg_direct.nn.replay.model_call import Call, fill_in, take_tensors
from pyg_direct.nn.whole_graphs import GraphKeeper
from pyg_direct.runtime.cuda.device import free_bytes
from pyg_direct.runtime.cuda.graph_capture import Recorder, find_wait, waits_refused

# Share of the free memory that tensors kept for backward may take twice.
_MOST_KEPT = 1 / 4
# Allowed difference of results of two computations of the same, for float32 and for narrower dtypes.
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


def leads_to(made: Sequence[Tensor], leaves: Sequence[Tensor]) -> bool:
    """Report whether gradients of results go to these leaves and to no others."""
    known, seen, nodes = {id(leaf) for leaf in leaves}, set(), [part.grad_fn for part in made]
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


def is_near(ours: Tensor, theirs: Tensor) -> bool:
    """Report whether results of two computations of the same are equal up to rounding."""
    if ours.shape != theirs.shape:
        return False
    if not theirs.is_floating_point():
        return torch.equal(ours, theirs)
    return bool((ours.double() - theirs.double()).norm() <= _find_tolerance(ours) * theirs.double().norm())


def are_near(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Report whether gradients are equal up to rounding, which parts that cancel out may have instead of zeros."""
    if not ours:
        return True
    apart = sum((one.double() - other.double()).square().sum() for one, other in zip(ours, theirs, strict=True))
    norm = sum(other.double().square().sum() for other in theirs)
    return bool(apart <= max(map(_find_tolerance, ours)) ** 2 * norm)


def _find_tolerance(rounded: Tensor) -> float:
    """Return the rounding that a norm may have, as a share of it."""
    narrow = rounded.dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled(rounded.device.type)
    is_rounded = narrow or torch.get_float32_matmul_precision() != "highest"
    return _APART_IF_NARROW if is_rounded else _APART


class Rules(NamedTuple):
    """Conditions of a recording.

    Attributes:
        is_graded: True if passes run backward.
        is_strict: True if results must be known to be right: forward reads no tensors of others, and the recording
            takes a small part of the memory.
    """

    is_graded: bool
    is_strict: bool


class RecordedPasses:
    """Passes of a model over places of fixed size; a subclass has the places."""

    _is_padded = False

    def __init__(self, model: Any, rules: Rules, device: torch.device) -> None:
        # The module holds this.
        self._model, self._rules, self._device = weakref.ref(model), rules, device
        self._held = list_tensors(model)
        self._parameters = [part for part in model.parameters() if part.requires_grad] if rules.is_graded else []
        # Of the arguments, those that have a gradient; a list for each pass.
        self._learning: list[Tensor] = []
        self._keeper = GraphKeeper([])
        self._leaves: list[Tensor] = []
        # Results as the model makes them, those with a gradient, and their nest.
        self._made: list[Tensor] = []
        self._graded: list[int] = []
        self._nest: Any = None
        self._outs: list[Tensor] = []
        self._grads: list[Tensor] = []
        self._gradients: list[Tensor | None] = []
        self._flat: Tensor | None = None
        # Leaves that have a gradient, and tensors of the shapes of these gradients.
        self._reached: list[bool] = []
        self._shapes: list[Tensor] = []
        self._reached_parameters: list[Tensor] = []
        # Storages that are kept for backward, and the parameters among them.
        self._saved: set[int] = set()
        self._saved_parameters: list[Tensor] = []
        self._modes: list[tuple[Any, bool]] = []
        self._autocast = (False, torch.float16)
        self._turn: weakref.ref[_Turn] | None = None
        self._graphs: list[Any] = []
        self._is_trial = True
        # Types and rows of layers that the passes leave out, and leaves whose gradient is zero without these.
        self._rows: RowsOfPass | None = None
        self._zeroed: list[bool] = []
        # Made again with the places. Then, buffers that forward writes.
        self._reads = HostReads(device, None)
        self._written: list[Tensor] = []

    # What a subclass has.

    def fill(self, call: Call) -> bool:
        """Copy the arguments of a pass; False if they do not fit."""
        raise NotImplementedError

    def make_again(self, call: Call) -> RecordedPasses:
        """Make other places for the arguments of a pass."""
        raise NotImplementedError

    def _compute(self) -> Any:
        """Call the model over the places."""
        raise NotImplementedError

    def _prepare(self) -> None:
        """Forget results for the arguments before."""

    def _find_misfit(self) -> str | None:
        """Return why the model's results cannot be returned; None if they can."""
        raise NotImplementedError

    def _find_difference(self, model: Any, call: Call) -> str | None:
        """Return why the results differ from those of an ordinary pass; None if they do not."""
        return None

    def cut(self, made: Sequence[Tensor], call: Call) -> list[Tensor]:
        """Return results of a pass in new memory."""
        return [part.clone() for part in made]

    def _spread(self, grads: Sequence[Tensor | None], call: Call) -> None:
        """Copy gradients of the results to their places."""
        for place, grad in zip(self._grads, grads, strict=True):
            place.zero_() if grad is None else place.copy_(grad)

    # For both.

    def is_busy(self) -> bool:
        """Report whether a forward pass may still run backward."""
        return self._turn is not None and self._turn() is not None

    def wait(self) -> None:
        """Wait until the GPU has finished with its memory."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def record(self, call: Call) -> str | None:
        """Record the passes over copied arguments; return why they cannot be recorded, otherwise None."""
        model: Any = self._model()
        reason = self._find_reason(model, call)
        self._made, self._gradients, self._flat = [], [], None
        if reason is not None:
            return reason
        self._is_trial = False
        self._modes = [(part, part.training) for part in model.modules()]
        self._autocast = torch.is_autocast_enabled(self._device.type), torch.get_autocast_dtype(self._device.type)
        # Values computed from its edges must be computed within the graph.
        self._prepare()
        recorder = Recorder(self._device)
        # New leaves: torch adds up a leaf's gradients on the stream of the living graph that met it first.
        with self._keeper, _own_leaves(model, self._parameters) as leaves:
            self._leaves = [*leaves, *self._learning]
            with nullcontext() if self._rows is None else self._rows.leave_out():
                self._graphs = [recorder.record(self._run)]
            self._outs = [part.detach() for part in self._made]
            if self._rules.is_graded:
                self._graphs.append(recorder.record(self._return))
        self._made, self._leaves = [], []
        # Others keep the gradient that they have, as in an ordinary pass.
        self._reached_parameters = list(compress(self._parameters, self._reached))
        self._saved_parameters = [part for part in self._parameters if part.untyped_storage()._cdata in self._saved]
        return None

    def _find_reason(self, model: Any, call: Call) -> str | None:
        """Return why passes cannot be recorded, or would differ from ordinary ones; None if neither."""
        if self._rules.is_graded and not self._parameters:
            return "no parameter has a gradient"
        self._prepare()
        with (
            self._keeper,
            _own_leaves(model, self._parameters) as leaves,
            left_as_it_was(model, self._device),
        ):
            self._leaves = [*leaves, *self._learning]
            foreign = self._find_foreign(model) if self._rules.is_strict else None
            if foreign is not None:
                return foreign
            traces = Traces(model, self._list_given())
            # Not before, as the first pass checks edges.
            self._reads.is_needed = True
            versions = [(part, part._version) for part in model.buffers()]
            # Also results that depend on the model's arguments, which are others here.
            reason = find_wait(self._run, Exception) or traces.find() or self._find_misfit() or self._find_return()
            self._written = [part for part, version in versions if part._version != version]
            if reason is None:
                self._rows = self._find_rows(model)
                reason = self._find_difference(model, call)
            return reason

    def _find_rows(self, model: Any) -> RowsOfPass | None:
        """Find types and rows of layers that passes can leave out; None without any."""
        if not any(isinstance(part, (HeteroConv, HGTConv)) for part in model.modules()):
            return None
        rows, saved, reached = RowsOfPass(), self._saved, self._reached
        expected: list[Tensor] = []
        gradients: list[Tensor] = []
        try:
            with left_as_it_was(model, self._device), rows.follow():
                expected = self._list_results(model)
            has_unread = rows.find_unread(self._made)
            gradients = self._list_gradients()
        except Exception:  # Any error of a model about operations that are followed.
            has_unread = False
        while has_unread:
            if self._serves(model, rows, expected, gradients):
                if rows.find_relus(self._made) and not self._serves(model, rows, expected, gradients):
                    rows.forget_relus()
                    # Also finds again which leaves are reached.
                    self._serves(model, rows, expected, gradients)
                self._zeroed = [was and not is_reached
                                for was, is_reached in zip(reached, self._reached, strict=True)]  # fmt: skip
                return rows
            self._reached, has_unread = reached, rows.keep_rows()
        self._saved = saved
        return None

    def _serves(self, model: Any, rows: RowsOfPass, expected: Sequence[Tensor], gradients: Sequence[Tensor]) -> bool:
        """Report whether a pass that leaves rows out has the expected results and gradients."""
        try:
            # No such number may reach a result or a buffer, and a recording cannot wait.
            with left_as_it_was(model, self._device), rows.leave_out(float("nan")), waits_refused():
                found = self._list_results(model)
            # Nor may it reach a gradient: a backward may read what its forward did not.
            return (
                all(ours.dtype == theirs.dtype and is_near(ours, theirs)
                    for ours, theirs in zip(found, expected, strict=True))
                and are_near(self._list_gradients(), gradients)
            )  # fmt: skip
        except Exception:  # Any error of a model, as about rows that have no gradient.
            return False

    def _list_gradients(self) -> list[Tensor]:
        """Run backward from various numbers; return the gradients of all leaves, zero where there is none."""
        if not self._rules.is_graded:
            return []
        for grad in self._grads:
            grad.copy_((torch.arange(grad.numel(), device=grad.device) % 7 + 1).view(grad.shape))
        try:
            self._return()
        finally:
            for grad in self._grads:
                grad.zero_()
        return [torch.zeros_like(leaf) if part is None else part.detach()
                for leaf, part in zip(self._leaves, self._gradients, strict=True)]  # fmt: skip

    def _list_results(self, model: Any) -> list[Tensor]:
        """Run forward; return its results, and what it leaves in buffers."""
        self._run()
        return [part.detach().clone() for part in (*self._made, *model.buffers())]

    def _find_foreign(self, model: Any) -> str | None:
        """Return why the tensors that forward reads, or the memory it keeps, forbid a recording; None if neither."""
        before = torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0
        reads = ForeignReads()
        try:
            with reads:
                self._run()
        except Exception as error:  # Any error of a model about its arguments.
            return describe(error)
        if self._device.type == "cuda":
            kept = torch.cuda.memory_allocated(self._device) - before
            if kept > _MOST_KEPT * free_bytes(self._device.index):
                return f"a recording would take {kept / 2**30:.1f} GiB more of the GPU's memory"
        known = [*list_tensors(model), *self._list_given(), *self._keeper.list_tensors()]
        shape = reads.find(known)
        return None if shape is None else (f"forward reads a tensor of shape {shape} that is neither an argument nor "
                                           "held by the model")  # fmt: skip

    def _list_given(self) -> list[Tensor]:
        raise NotImplementedError

    def _run(self) -> None:
        if not self._rules.is_graded:
            with torch.no_grad(), self._answered():
                made = self._compute()
        elif self._is_trial and torch.is_grad_enabled():
            self._saved = set()
            with torch.autograd.graph.saved_tensors_hooks(self._note_saved, lambda kept: kept), self._answered():
                made = self._compute()
        else:
            with self._answered():
                made = self._compute()
        self._made = []
        self._nest = take_tensors(made, self._made)

    def _answered(self) -> AbstractContextManager[Any]:
        """Return a block for a forward pass whose reads on the host are learned, or answered."""
        return self._reads if self._reads.is_needed else nullcontext()

    def _note_saved(self, tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided:
            self._saved.add(tensor.untyped_storage()._cdata)
        # A result that a hook returns as it is would keep itself alive.
        return tensor.detach()

    def _find_results(self) -> str | None:
        """Find the results that have gradients; return why they cannot be returned, or None."""
        if self._nest is None:
            return "the model gives results of other kinds than tensors"
        if any(part.layout is not torch.strided or type(part) is not Tensor for part in self._made):
            return "the model gives tensors of another kind"
        self._graded = [place for place, part in enumerate(self._made) if part.requires_grad]
        if self._rules.is_graded and not self._graded:
            return "the model gives nothing with a gradient"
        if not leads_to([self._made[place] for place in self._graded], self._leaves):
            return "gradients are asked for by what is no parameter of the model"
        self._grads = [torch.zeros_like(self._made[place]) for place in self._graded]
        return None

    def _find_return(self) -> str | None:
        """Return why the backward pass cannot be recorded, or gives odd gradients; None if neither."""
        if not self._rules.is_graded:
            return None
        reason = find_wait(self._return, Exception)
        dense = [part for part in self._gradients if part is not None]
        if reason is not None:
            return reason
        if any(part.layout is not torch.strided for part in dense):
            return "gradients are sparse"
        # Rows that have no gradient give none to the parameters.
        if self._is_padded and not all(bool(part.isfinite().all()) for part in dense):
            return "gradients of rows left over are not numbers"
        return None

    def _return(self) -> None:
        """Run backward from the results of the last `_run`."""
        made = [self._made[place] for place in self._graded]
        # As without a caller's autocast, which is how a loop runs backward.
        fills = MaskedFills() if self._reads.fills else nullcontext()
        with torch.autocast(self._device.type, enabled=False), fills:
            found = torch.autograd.grad(made, self._leaves, self._grads, allow_unused=True)
        if any(self._zeroed):
            # Autograd would lead there through memory that relations share, such as rows of all types.
            found = tuple([torch.zeros_like(leaf) if is_zero else part
                           for part, leaf, is_zero in zip(found, self._leaves, self._zeroed, strict=True)])  # fmt: skip
        dense = [part for part in found if part is not None and part.layout is torch.strided]
        self._gradients, self._reached = list(found), [part is not None for part in found]
        # Gradients of a trial are checked.
        if not self._is_trial and dense and all(part.dtype == dense[0].dtype for part in dense):
            # Returned by one copy.
            self._shapes = [torch.empty(part.shape, device="meta") for part in dense]
            self._flat, self._gradients = torch.cat([part.reshape(-1) for part in dense]), []

    def replay(self, call: Call) -> Any:
        """Return the result of the model for the copied arguments.

        Raises:
            OtherAnswersError: forward would read other numbers on the host; the model is as before.
        """
        if self._rules.is_graded:
            learning = compress(self._list_learning(call), self._reached[len(self._parameters) :])
            # Bypass the `torch.func` support of `Function.apply`; its transforms do not come here.
            outs = super(Function, _Replayed).apply(self, call, *self._reached_parameters, *learning)  # type: ignore[misc]
        else:
            self._launch(None)
            outs = self.cut(self._outs, call)
        return fill_in(self._nest, iter(outs))

    def _list_learning(self, call: Call) -> list[Tensor]:
        """Return the arguments of a pass that have a gradient."""
        return []

    def go_forth(self, call: Call) -> tuple[list[Tensor], _Turn]:
        """Return results of a pass in new memory."""
        turn = _Turn(self._device, list(map(read_version, self._parameters)))
        self._launch(turn)
        self._turn = weakref.ref(turn)
        return self.cut(self._outs, call), turn

    def _launch(self, turn: _Turn | None) -> None:
        """Replay forward."""
        if not self._reads.answers:
            self._graphs[0].replay()
            return
        turn = turn or _Turn(self._device, [])
        before = [part.clone() for part in self._written]
        self._reads.expect()
        self._graphs[0].replay()
        if self._reads.differ():
            turn.draw_again()
            for part, value in zip(self._written, before, strict=True):
                # Not counted as a write: a pass may have kept the buffer for its backward.
                part.data.copy_(value)
            raise OtherAnswersError

    def go_back(self, turn: _Turn, grads: Sequence[Tensor | None], call: Call) -> Sequence[Tensor | None]:
        """Return gradients of the parameters and arguments that have one, in new memory."""
        self._check_versions(turn, only_saved=True)
        self._turn = None
        self._spread([grads[place] for place in self._graded], call)
        self._graphs[1].replay()
        if self._flat is None:
            return [part.clone() for part in self._gradients if part is not None]
        return torch._utils._unflatten_dense_tensors(self._flat.clone(), self._shapes)  # type: ignore[no-any-return]

    def is_at(self, turn: _Turn) -> bool:
        """Report whether the memory of a pass is still its own."""
        return self._turn is not None and self._turn() is turn

    def _check_versions(self, turn: _Turn, *, only_saved: bool = False) -> None:
        if list(map(read_version, self._parameters)) == turn.versions:
            return
        known = set(map(id, self._saved_parameters if only_saved else self._parameters))
        for parameter, version in zip(self._parameters, turn.versions, strict=True):
            if id(parameter) in known and parameter._version != version:
                raise RuntimeError("one of the variables needed for gradient computation has been modified by an "
                                   f"inplace operation: a parameter of shape {tuple(parameter.shape)} is at version "
                                   f"{parameter._version}; expected version {version} instead")  # fmt: skip

    def go_back_again(self, turn: _Turn, grads: Sequence[Tensor | None], call: Call) -> Sequence[Tensor | None]:
        """Return gradients by an ordinary pass with the same draws: for a second backward, or one with a graph."""
        self._check_versions(turn)
        model: Any = self._model()
        if model is None:
            raise RuntimeError("the model of a replayed pass is gone; keep it, or call accelerate(model, replay=False)")
        again = self.make_again(call)
        again.fill(call)
        again._prepare()
        learning = self._list_learning(call)
        again._learning = learning
        with left_as_it_was(model, self._device), torch.enable_grad():
            for part, is_training in self._modes:
                part.training = is_training
            turn.draw_again()
            with torch.autocast(self._device.type, enabled=self._autocast[0], dtype=self._autocast[1]), again._keeper:
                again._is_trial = False
                again._run_for(learning)
            outs = again.cut(again._made, call)
        pairs = [(outs[place], grads[place]) for place in self._graded if grads[place] is not None]
        found = torch.autograd.grad([out for out, _ in pairs], [*self._parameters, *learning],
                                    [grad for _, grad in pairs], allow_unused=True,
                                    create_graph=torch.is_grad_enabled())  # fmt: skip
        return list(compress(found, self._reached))

    def _run_for(self, learning: Sequence[Tensor]) -> None:
        """Run forward with these arguments in the places of those that have a gradient."""
        self._run()


class _Turn:
    """One forward pass, alive as long as it may run backward, and the draws before it."""

    __slots__ = ("__weakref__", "_drawn", "_generator", "versions")

    def __init__(self, device: torch.device, versions: list[int]) -> None:
        self.versions, self._generator = versions, None
        self._drawn: Any
        if device.type == "cuda":
            self._generator = torch.cuda.default_generators[device.index]
            self._drawn = self._generator.initial_seed(), self._generator.get_offset()
        else:
            self._drawn = torch.get_rng_state()

    def draw_again(self) -> None:
        """Set the random numbers of the GPU as they were before the pass."""
        if self._generator is None:
            torch.set_rng_state(self._drawn)
            return
        self._generator.manual_seed(self._drawn[0])
        self._generator.set_offset(self._drawn[1])


class _Replayed(Function):
    @staticmethod
    def forward(ctx: Any, recording: RecordedPasses, call: Call, *leaves: Tensor) -> tuple[Tensor, ...]:
        outs, ctx.turn = recording.go_forth(call)
        ctx.set_materialize_grads(False)
        graded = recording._graded
        if len(graded) < len(outs):
            ctx.mark_non_differentiable(*[out for place, out in enumerate(outs) if place not in graded])
        # Released by torch after the last backward: a kept loss holds no arguments.
        ctx.save_for_backward(*call.tensors)
        ctx.recording, ctx.call, ctx.is_first = recording, call.drop_tensors(), True
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        recording, turn = ctx.recording, ctx.turn
        is_first, ctx.is_first = ctx.is_first, False
        if all(grad is None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        if is_first and recording.is_at(turn) and not torch.is_grad_enabled():
            found = recording.go_back(turn, grads, ctx.call)
        else:
            found = recording.go_back_again(turn, grads, ctx.call._replace(tensors=list(ctx.saved_tensors)))
        return None, None, *found


class WholePasses(RecordedPasses):
    """Passes over tensors of the program that come back in each pass, such as those of a whole graph.

    Args:
        moving: Positions of tensors that are others in each pass; they are copied.
    """

    def __init__(self, model: Any, rules: Rules, call: Call, moving: frozenset[int]) -> None:
        super().__init__(model, rules, call.tensors[0].device)
        self._moving, self._addresses, self._nest_of_args = moving, call.addresses, call.nest
        self._places = []
        for number, tensor in enumerate(call.tensors):
            place = tensor.detach().clone(memory_format=torch.preserve_format) if number in moving else tensor.detach()
            self._places.append(place.requires_grad_() if rules.is_graded and tensor.requires_grad else place)
        self._learning = [place for place in self._places if place.requires_grad]
        self._keeper = GraphKeeper([place for number, place in enumerate(self._places) if number not in moving])

    def make_again(self, call: Call) -> WholePasses:
        """Make other places for the arguments of a pass."""
        return WholePasses(self._model(), self._rules, call, self._moving)

    def _list_given(self) -> list[Tensor]:
        return self._places

    def fill(self, call: Call) -> bool:
        """Copy the arguments of a pass; False if they do not fit."""
        if not self._moving:
            return call.addresses == self._addresses
        if any(call.addresses[number] != address for number, address in enumerate(self._addresses)
               if number not in self._moving):  # fmt: skip
            return False
        with torch.no_grad():
            for number in self._moving:
                self._places[number].copy_(call.tensors[number])
        return True

    def _list_learning(self, call: Call) -> list[Tensor]:
        if not self._rules.is_graded:
            return []
        return [tensor for tensor, place in zip(call.tensors, self._places, strict=True) if place.requires_grad]

    def _compute(self, tensors: Sequence[Tensor] | None = None) -> Any:
        model: Any = self._model()
        args, kwargs = fill_in(self._nest_of_args, iter(self._places if tensors is None else tensors))
        return type(model).forward(model, *args, **kwargs)

    def _run_for(self, learning: Sequence[Tensor]) -> None:
        learning = list(learning)
        self._places = [learning.pop(0) if place.requires_grad else place for place in self._places]
        self._run()

    def _find_misfit(self) -> str | None:
        owned = [*self._list_given(), *self._held]
        outside = {tensor.untyped_storage()._cdata for tensor in owned if tensor.layout is torch.strided}
        if any(part.layout is torch.strided and part.untyped_storage()._cdata in outside for part in self._made):
            return "the model gives an argument or a parameter back"
        spans = sorted(_span(part) for part in self._made if part.layout is torch.strided and part.numel())
        if any(end > begin for (_, end), (begin, _) in pairwise(spans)):
            return "the model gives tensors that share memory"
        if not self._rules.is_graded and any(part.requires_grad for part in self._made):
            return "forward asks for gradients by itself"
        return self._find_results()


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the first address of a tensor and the one after its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
