"""A model whose passes forward and backward a GPU replays as CUDA graphs, within a training loop that stays as it is.

`GraphedStep` replays whole steps, which a loop must call; this is for the loops that there are.
"""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch_geometric.nn import MessagePassing

from pyg_direct.errors import ArgumentError, warn
from pyg_direct.nn.attached import attach, detach, is_attached
from pyg_direct.nn.call import Call, read_call
from pyg_direct.nn.norms import find_norm_over_nodes
from pyg_direct.nn.padded import Sizes
from pyg_direct.nn.passes import RecordedPasses
from pyg_direct.ops.launch import is_ordinary

# Ordinary passes before one is recorded, and batches in a row that found no room after which there is made more.
_WARM_UP = 8
_MISSES = 4
# Kinds of calls one after the other, none of which stays, after which none is expected to.
_CHANGES = 32
# What calls a model on its own terms.
_SPREAD = (DataParallel, DistributedDataParallel, FullyShardedDataParallel)


class Replay:
    """Replays a model's passes; `accelerate(model, replay=True)` attaches one.

    Attributes:
        replayed, ordinary: Training passes of both kinds so far.
        reason: Why none is replayed, None where they may be.
    """

    def __init__(self) -> None:
        self.replayed = self.ordinary = 0
        self.reason: str | None = None
        self._thread: int | None = None
        self._recording: RecordedPasses | None = None
        # Of the recording, or of those calls in a row that may be recorded next.
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

    def __repr__(self) -> str:
        reason = "" if self.reason is None else f", reason={self.reason!r}"
        return f"Replay(replayed={self.replayed}, ordinary={self.ordinary}{reason})"

    def run(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the model gives for its arguments."""
        plain = type(model).forward
        if not (model.training and torch.is_grad_enabled() and is_ordinary()) or _is_repeated():
            return plain(model, *args, **kwargs)
        call = self._read(model, args, kwargs)
        recording = self._recording
        # What a pass keeps for its way back lies where that of the next would.
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
        except Exception as error:  # Such as memory that runs out: the loop goes on as without.
            reason = (str(error) or type(error).__name__).splitlines()[0]
        if reason is not None:
            self._refuse(reason)

    def _record(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call, largest: Sizes
                ) -> str | None:  # fmt: skip
        # The memory of an earlier one serves the next, once nothing reads it.
        if self._recording is not None:
            self._recording.wait()
        self._recording = None
        made = RecordedPasses(model, args, kwargs, call, largest)
        # A small one leaves over more than finds room; the next may not.
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
    """Whether a pass is repeated on the way back, or what it keeps is handed to others, as by checkpoints."""
    if torch._C._current_graph_task_id() != -1:
        return True
    try:
        # Refused where there are some; torch 2.6 has no other way to ask.
        with torch.autograd.graph.disable_saved_tensors_hooks("hooks are in force"):
            return False
    except RuntimeError:
        return True


def check(model: torch.nn.Module) -> None:
    """Ask whether a model may be replayed.

    Raises:
        ArgumentError: a norm looks at all nodes, or the model is no module that holds convolutions.
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
    """Let a model replay its passes, which `check` was asked about."""
    replay = Replay()
    # TorchScript compiles the `forward` of the instance.
    attach(model, forward=forward, _replay=replay, __prepare_scriptable__=copy.copy)
    return replay


def forget_replay(model: torch.nn.Module) -> None:
    """The opposite of `watch_passes`."""
    if is_attached(model, "forward", forward):
        detach(model, "forward", "_replay", "__prepare_scriptable__")


# Not for TorchScript, which takes that of the class.
@torch.jit.unused
def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """What replaces `forward` of a model that is replayed."""
    return self._replay.run(self, args, kwargs)
