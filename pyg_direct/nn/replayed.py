"""A model whose passes forward and backward a GPU replays as CUDA graphs, within a training loop that stays as it is.

`GraphedStep` replays whole steps, which a loop must call; this is for the loops that there are.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as modules
from torch_geometric.nn import MessagePassing

from pyg_direct.errors import ArgumentError, warn
from pyg_direct.nn.norms import find_norm_over_nodes
from pyg_direct.nn.padded import Sizes
from pyg_direct.nn.passes import Call, RecordedPasses
from pyg_direct.nn.propagate import is_ordinary
from pyg_direct.nn.sorted import find_batch
from pyg_direct.nn.trimmed import has_hooks

# Ordinary passes before one is recorded, and batches in a row that found no room after which there is made more.
_WARM_UP = 8
_MISSES = 4
# What stays as it is while passes are recorded.
_SETTINGS = frozenset((bool, int, float, str, type(None)))


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
        self._recording: RecordedPasses | None = None

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

    def _note(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call) -> None:
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
            made = RecordedPasses(model, args, kwargs, call, self._largest)
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


def _read(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
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
    return Call((*kinds, *state), Sizes(*sizes), edge_index, rows)


def _read_state(model: Any) -> tuple[Any, ...] | None:
    """Of a model and of torch, what recorded passes depend on; None where something looks at what modules give."""
    state: list[Any] = [torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"),
                        torch.are_deterministic_algorithms_enabled(),
                        torch.get_float32_matmul_precision()]  # fmt: skip
    for part in model.modules():
        # Those of the model itself are called around its `forward`.
        if (part is not model and has_hooks(part)) or (isinstance(part, MessagePassing) and _is_watched(part)):
            return None
        # Such as the share of a dropout.
        state += [id(part), *(value for value in part.__dict__.values() if type(value) in _SETTINGS)]
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None:
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
