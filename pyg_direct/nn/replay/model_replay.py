"""Replay of a model's passes within an unchanged training loop, as CUDA graphs of `recorded_passes.py`.

A loop must call `GraphedStep` to replay whole steps; this module serves existing loops.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch_geometric.nn import HeteroConv, MessagePassing

from pyg_direct.errors import ArgumentError, describe, warn
from pyg_direct.nn.module_state import attach, copy_plain, detach, is_attached
from pyg_direct.nn.paths import Paths
from pyg_direct.nn.replay.batch_passes import GraphPasses, PaddedPasses
from pyg_direct.nn.replay.guards import Outside, State
from pyg_direct.nn.replay.host_reads import OtherAnswersError
from pyg_direct.nn.replay.model_call import Call, read_call
from pyg_direct.nn.replay.padded_batch import GraphSizes
from pyg_direct.nn.replay.recorded_passes import RecordedPasses, Rules, WholePasses
from pyg_direct.object_text import one_line, show_options
from pyg_direct.ops.run_kernel import is_recorded, is_transformed
from pyg_direct.progress import announce

# Ordinary passes before one is recorded, and consecutive calls that did not fit after which places are made anew.
# Both double with each recording after the second, up to a limit.
_WARM_UP = 8
_MISSES = 4
_MOST_PATIENCE = 6
# Consecutive calls of different kinds, after which no kind is expected to repeat.
_CHANGES = 32
# Recordings for batches of several kinds, or for several passes before their backward, as for both ends of links.
_MOST_KINDS = 4
# A replay that would read other numbers on the host is worth as many that do not. Beyond the most of them, or after so
# many recordings, others are awaited, or none.
_COST, _MOST_COST, _MOST_DROPPED = 4, 32, 6
_CHANGING = "numbers that forward reads on the host change again and again"
# Replay of `accelerate` and `run` if the caller does not choose.
_BY_DEFAULT = True
# Backward of a replayed pass runs in the thread that calls it: handing it to torch's thread of the GPU and back takes
# longer than its launches.
_IN_ONE_THREAD = True
# Wrappers that call a model in their own way.
_SPREAD = (DataParallel, DistributedDataParallel, FullyShardedDataParallel)


class _Calls:
    """Calls of one kind so far: the largest batch, a row of each of its tensors, and tensors that do not come back."""

    def __init__(self, kind: tuple[Any, ...]) -> None:
        self.kind, self.times = kind, 0
        # `Sizes` or `GraphSizes`.
        self.largest: Any = None
        self.rows: dict[int, Tensor] = {}
        self._addresses: tuple[Any, ...] = ()
        self.moving: frozenset[int] = frozenset()

    def add(self, call: Call) -> None:
        self.times += 1
        if call.sizes is not None:
            self.largest = call.sizes if self.largest is None else self.largest.join(call.sizes)
            for place, tensor in enumerate(call.tensors):
                if place not in self.rows and len(tensor) > 0:
                    self.rows[place] = tensor[:1].detach().clone()
            return
        if self._addresses:
            self.moving |= {place for place, pair in enumerate(zip(self._addresses, call.addresses, strict=True))
                            if pair[0] != pair[1]}  # fmt: skip
        self._addresses = call.addresses

    def summarize(self) -> tuple[Any, ...]:
        """Return the properties on which the places of a recording depend."""
        return self.largest, self.moving, tuple(address for place, address in enumerate(self._addresses)
                                                if place not in self.moving)  # fmt: skip


class _Passes:
    """Passes with a gradient or without, in training or in evaluation: their recording, and calls that come before.

    Args:
        state: Reader of the model's state in these passes.
    """

    def __init__(self, rules: Rules, state: State) -> None:
        self._rules, self.state = rules, state
        self.recording: RecordedPasses | None = None
        # For the recording, and consecutive calls of another kind that may be recorded next.
        self._calls: _Calls | None = None
        self._next: _Calls | None = None
        self._recorded: tuple[Any, ...] = ()
        self._changes = self._missed = 0
        # Recordings, and by how many bits more calls are wanted before the next one.
        self._times = self._patience = 0
        # Replays that would read other numbers, and recordings that were given up for them.
        self._cost = self._dropped = 0

    def serves(self, call: Call) -> bool:
        """Report whether a call is of the kind that is recorded or awaited, and no backward of it is."""
        if self.recording is None:
            return self._next is None or call.kind == self._next.kind
        assert self._calls is not None, "recorded with them"
        return call.kind == self._calls.kind and not self.recording.is_busy()

    def has_state(self, call: Call) -> bool:
        """Report whether the last calls were made in the same state of the model."""
        calls = self._calls if self.recording is not None else self._next
        return calls is not None and calls.kind[-1] is call.kind[-1]

    def find(self, call: Call) -> RecordedPasses | None:
        """Return the recording, filled with the arguments of a call; None if it cannot serve them."""
        recording, calls = self.recording, self._calls
        if recording is None or calls is None or call.kind != calls.kind or recording.is_busy():
            return None
        if not recording.fill(call):
            return None
        self._next, self._missed, self._changes = None, 0, 0
        return recording

    def note_replay(self) -> None:
        """Learn that a replay was right."""
        self._cost = max(self._cost - 1, 0)

    def note_difference(self) -> str | None:
        """Learn that a replay would have read other numbers on the host; return why passes cannot be replayed."""
        self._cost += _COST
        if self._cost > _MOST_COST:
            self.give_up()
            self._cost, self._dropped = 0, self._dropped + 1
        return None if self._dropped < _MOST_DROPPED else _CHANGING

    def give_up(self) -> None:
        """Forget the recording, once the GPU no longer reads its memory."""
        if self.recording is not None:
            self.recording.wait()
        self.recording = None

    def note(self, model: Any, call: Call) -> str | None:
        """Learn from an ordinary pass, and record once enough are known; return why passes cannot be replayed."""
        if self.recording is not None and self.recording.is_busy():
            # The next pass would overwrite the tensors that a pass keeps for its backward.
            return None
        calls = self._calls
        if self.recording is not None and calls is not None and call.kind == calls.kind:
            calls.add(call)
            self._missed += 1
            if self._missed < _MISSES << self._patience or self._recorded == calls.summarize():
                return None
        else:
            if self._next is None or call.kind != self._next.kind:
                self._next = _Calls(call.kind)
                self._changes += 1
                if self._changes > _CHANGES:
                    return "what the model holds, or is called with besides a batch, changes again and again"
            calls = self._next
            calls.add(call)
            # Graphs that take turns are not recorded at every turn: a recording takes as long as many passes.
            if calls.times <= _WARM_UP << self._patience:
                return None
        self._missed = 0
        try:
            return self._record(model, call, calls)
        except Exception as error:  # Such as memory that runs out: the loop goes on without replay.
            return describe(error)

    def _record(self, model: Any, call: Call, calls: _Calls) -> str | None:
        # The memory of an earlier one serves the next.
        self.give_up()
        made: Any
        if call.sizes is None:
            made = WholePasses(model, self._rules, call, calls.moving)
        elif isinstance(call.sizes, GraphSizes):
            made = GraphPasses(model, self._rules, call, calls.largest)
        else:
            made = PaddedPasses(model, self._rules, call, calls.largest, calls.rows)
        # A small batch leaves more padding than fits; the next may not.
        if not made.fill(call):
            return None
        reason = made.record(call)
        if reason is None:
            self._patience, self._times = min(self._times, _MOST_PATIENCE), self._times + 1
            self.recording, self._calls, self._recorded, self._next = made, calls, calls.summarize(), None
        return reason


class Replay:
    """Replay of a model's passes; `accelerate` attaches one.

    Args:
        is_strict: Replay whole graphs and evaluation too, only if results are known to be right, and log why not.
            Otherwise training passes over batches are replayed, and a warning says why not.

    Attributes:
        replayed, ordinary: Passes of both kinds so far; if not strict, training passes.
        reason: Why none is replayed, None if they may be.
    """

    # Of all models of this process.
    total: ClassVar[int] = 0

    def __init__(self, is_strict: bool) -> None:
        self.replayed = self.ordinary = 0
        self.reason: str | None = None
        self._is_strict = is_strict
        self._thread: int | None = None
        self._outside: Outside | None = None
        # By: with a gradient, in training. Behind the first, those of other kinds, or before a backward.
        self._passes: dict[tuple[bool, bool], list[_Passes]] = {}
        # Setting of autograd's threads before the first replay.
        self._spread_before: bool | None = None

    def __deepcopy__(self, memo: Any) -> Replay:
        # Graphs belong to the memory of one model: copies record their own.
        return Replay(self._is_strict)

    @one_line
    def __repr__(self) -> Iterator[str]:
        yield from (f"replayed={self.replayed}", f"ordinary={self.ordinary}", *show_options(reason=self.reason))

    def run(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of the model for its arguments; torch neither compiles nor traces."""
        plain, is_graded, is_trained = type(model).forward, torch.is_grad_enabled(), model.training
        if not (self._is_strict or (is_trained and is_graded)):
            return plain(model, *args, **kwargs)
        # Training without a gradient may be the first pass of a checkpoint, and is repeated in backward.
        if (self.reason is not None or is_trained > is_graded or is_transformed() or (is_graded and _is_repeated())
                or _is_recording()):  # fmt: skip
            self.ordinary += 1
            return plain(model, *args, **kwargs)
        group = self._find_group(model, is_graded, is_trained)
        call = read_call(model, args, kwargs, group[0].state) if group else None
        if call is not None and (self._is_strict or call.sizes is not None):
            passes = _choose(group, call)
            recording = passes.find(call)
            if recording is not None:
                if is_graded and self._spread_before is None:
                    self._spread_before = torch._C._is_multithreading_enabled()
                    torch.autograd.set_multithreading_enabled(not _IN_ONE_THREAD and self._spread_before)
                try:
                    found = recording.replay(call)
                except OtherAnswersError:
                    reason = passes.note_difference()
                else:
                    passes.note_replay()
                    self.replayed += 1
                    Replay.total += 1
                    return found
            else:
                with ordinary_passes:
                    reason = passes.note(model, call)
            if reason is not None:
                self._refuse(reason)
        self.ordinary += 1
        return plain(model, *args, **kwargs)

    def _find_group(self, model: Any, is_graded: bool, is_trained: bool) -> list[_Passes]:
        """Return the passes with a gradient or without, in training or not; none if none can be replayed."""
        thread = threading.get_ident()
        if self._thread not in (None, thread):
            self._refuse("the model is called in several threads")
            return []
        self._thread = thread
        group = self._passes.get((is_graded, is_trained))
        if group is not None:
            return group
        if self._outside is None:
            self._outside = Outside(model)
            if self._is_strict and self._outside.reason is not None:
                self._refuse(self._outside.reason)
                return []
        group = [_Passes(Rules(is_graded, self._is_strict), State(self._outside))]
        self._passes[is_graded, is_trained] = group
        return group

    def release(self) -> None:
        """Restore the threads of backward."""
        if self._spread_before is not None:
            torch.autograd.set_multithreading_enabled(self._spread_before)

    def _refuse(self, reason: str) -> None:
        self.reason = reason
        for group in self._passes.values():
            group[0].recording = None
            del group[1:]
        said = f"passes of the model are not replayed as CUDA graphs: {reason}"
        if self._is_strict:
            announce(said)
        else:
            warn(said, RuntimeWarning)


def _choose(group: list[_Passes], call: Call) -> _Passes:
    """Return the passes that serve a call: others for another kind of batches, or while a backward is awaited."""
    first = group[0]
    found = next((passes for passes in group if passes.serves(call)), None)
    if found is not None:
        return found
    if not first.has_state(call):
        # Those of the state before do not come back.
        for passes in group[1:]:
            passes.give_up()
        del group[1:]
    elif call.sizes is not None and len(group) < _MOST_KINDS:
        group.append(_Passes(first._rules, first.state))
    else:
        return first
    return group[-1]


class _OrdinaryPasses(threading.local):
    """Block of this thread in which no pass is replayed, such as that of a recording."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1


ordinary_passes = _OrdinaryPasses()


def _is_recording() -> bool:
    return ordinary_passes.depth > 0


def _is_repeated() -> bool:
    """Report whether a pass is repeated in backward, or hooks receive its saved tensors, as in checkpoints."""
    if torch._C._current_graph_task_id() != -1:
        return True
    hooks = torch._C._autograd
    if hooks._saved_tensors_hooks_get_disabled_error_message() is not None:
        # Then there are none.
        return False
    try:
        # Refused if there are such hooks; torch 2.6 has no other way to ask. Its context takes longer.
        hooks._saved_tensors_hooks_disable("hooks are in force")
    except RuntimeError:
        return True
    finally:
        hooks._saved_tensors_hooks_enable()
    return False


def check(model: torch.nn.Module) -> None:
    """Check whether a model may be replayed."""
    method = getattr(model.__dict__.get("forward", forward), "__func__", forward)
    # A HeteroConv by itself has a forward of ours, which sums its relations together.
    if isinstance(model, (MessagePassing, HeteroConv)) or method not in (forward, type(model).forward):
        raise ArgumentError("model must be one that holds convolutions to be replayed, and not have a forward that was "
                            f"replaced, got {type(model).__name__}")  # fmt: skip
    spread = next((part for part in model.modules() if isinstance(part, _SPREAD)), None)
    if spread is not None:
        raise ArgumentError(f"model must be the one that {type(spread).__name__} holds to be replayed, before it is "
                            "given to that")  # fmt: skip


def may_watch(model: torch.nn.Module) -> bool:
    """Report whether `check` finds nothing, and a convolution is in the model."""
    try:
        check(model)
    except ArgumentError:
        return False
    return any(isinstance(part, MessagePassing) for part in model.modules())


def replays_by_default() -> bool:
    """Report whether models are replayed, as by `"auto"`, if the caller does not choose: on a machine with a GPU."""
    return _BY_DEFAULT and torch.cuda.is_available()


def watch_passes(model: torch.nn.Module, is_strict: bool) -> Replay:
    """Let a model replay its passes, after `check`.

    Args:
        is_strict: See `Replay`.
    """
    replay = Replay(is_strict)
    # TorchScript compiles the `forward` of the instance.
    attach(model, forward=forward, _replay=replay, __prepare_scriptable__=copy_plain)
    if type(model).train is torch.nn.Module.train and "train" not in model.__dict__:
        attach(model, train=train)
    return replay


def forget_replay(model: torch.nn.Module) -> None:
    """Undo `watch_passes`."""
    if is_attached(model, "forward", forward):
        replay: Replay = model.__dict__["_replay"]
        replay.release()
        detach(model, "forward", "_replay", "__prepare_scriptable__")
        if is_attached(model, "train", train):
            detach(model, "train")


# Not for TorchScript, which takes the method of the class.
@torch.jit.unused
def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Override `forward` of a model that is replayed."""
    if is_recorded():
        return type(self).forward(self, *args, **kwargs)
    return self._replay.run(self, args, kwargs)


def train(self: Any, mode: bool = True) -> Any:
    """Override `train` of a model that is replayed, which loops call twice an epoch.

    Modes of modules are set without a call of Python for each; a GNN with many relations has a hundred.
    """
    owns: list[dict[str, Any]] = []
    if not isinstance(mode, bool) or is_recorded() or not _list_plain(self, owns, set()):
        return type(self).train(self, mode)
    for own in owns:
        own["training"] = mode
    return self


def _list_plain(module: Any, owns: list[dict[str, Any]], kinds: set[type]) -> bool:
    """List the dictionaries of a module and of its parts; False if a part has another `train` than torch's."""
    own = module.__dict__
    owns.append(own)
    for part in own["_modules"].values():
        if part is None:
            continue
        kind = type(part)
        if kind not in kinds:
            if not _has_plain_mode(kind):
                return False
            kinds.add(kind)
        # A program may freeze a part so.
        if "train" in part.__dict__ or not _list_plain(part, owns, kinds):
            return False
    return True


def _has_plain_mode(kind: Any) -> bool:
    """Report whether modules of a class keep and change their mode as torch does."""
    return (kind.train is torch.nn.Module.train and kind.__setattr__ is torch.nn.Module.__setattr__
            and not hasattr(kind, "training"))  # fmt: skip


class SearchingPaths(Paths):
    """Paths of a convolution that was not called yet; its first call replays the model that the program called.

    An unedited program names no model. It is the outermost module on the stack that `check` allows.
    """

    __slots__ = ()

    def note(self) -> None:
        """Count a call that accelerated operators served."""
        self._watch_caller()
        Paths.note(self)

    def note_left(self, reason: str) -> None:
        """Count a call that was left to PyG."""
        self._watch_caller()
        Paths.note_left(self, reason)

    def _watch_caller(self) -> None:
        self.__class__ = Paths  # type: ignore[assignment]
        if _is_recording():
            return
        found = None
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if frame.f_code is _CALL:
                model = frame.f_locals["self"]
                if may_watch(model):
                    found = model
            frame = frame.f_back
        if found is not None and not is_attached(found, "forward", forward):
            for part in found.modules():
                forget_replay(part)
            watch_passes(found, is_strict=True)

    def __deepcopy__(self, memo: Any) -> Paths:
        return SearchingPaths(self._total)


# Code of `Module.__call__`.
_CALL = torch.nn.Module._call_impl.__code__
