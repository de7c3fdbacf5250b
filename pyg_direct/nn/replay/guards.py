"""Guards of replay: the arguments and state on which a model's passes depend, so that equal ones can be replayed.

`read_call` reads them. `Traces` finds, before a pass is recorded, effects besides its result; a recorded pass would
not repeat them. `left_as_it_was` restores the model's buffers and the random numbers after a trial.
`find_norm_over_nodes` finds norms that look at all nodes of a batch together.
"""

from __future__ import annotations

import random
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules import module as modules
from torch.nn.modules.batchnorm import _NormBase
from torch_geometric.nn import MessagePassing, norm

from pyg_direct.nn.replay.padded_batch import Sizes
from pyg_direct.nn.sorted_edges import find_batch
from pyg_direct.nn.trimming import has_hooks

# Attributes of modules that are compared by value.
_SETTINGS = frozenset((bool, int, float, str, type(None)))
_FUNCTIONS = frozenset((FunctionType, BuiltinFunctionType))
_TENSORS = frozenset((Tensor, torch.nn.Parameter))
_MOST_ITEMS = 16


class Call(NamedTuple):
    """Arguments of a model's call.

    Attributes:
        kind: Key that must be equal for passes that are recorded once.
        sizes: Nodes and edges of each hop of the batch.
        edge_index: Its edges.
        rows: Tensors of rows by the position of the argument.
    """

    kind: tuple[Any, ...]
    sizes: Sizes
    edge_index: Tensor
    rows: dict[int, Tensor]


def read_call(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """Read the arguments of a model's call; None if its kind does not determine a pass."""
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
    num_nodes, num_edges, rows = sum(sizes[0]), sum(sizes[1]), {}
    kinds: list[Any] = [len(args), *kwargs, len(sizes[1]), known.max_degree, edge_index.dtype]
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
            if not all(type(item) is int for item in value) or tuple(value) not in sizes:
                return None
            kinds.append("nodes of hops" if len(value) == len(sizes[0]) else "edges of hops")
        elif type(value) in _SETTINGS:
            kinds.append((type(value), value))
        else:
            return None
    state = _read_state(model, edge_index.device)
    return None if state is None else Call((*kinds, *state), Sizes(*sizes), edge_index, rows)


def _can_record(device: torch.device) -> bool:
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def _read_state(model: Any, device: torch.device) -> tuple[Any, ...] | None:
    """Read the state of a model and of torch on which recorded passes depend; None if a hook watches, or a tensor is on
    another device.
    """
    # torch calls the second ones for each operation.
    if (modules._global_forward_pre_hooks or modules._global_forward_hooks or modules._global_backward_pre_hooks
            or modules._global_backward_hooks or torch._C._len_torch_dispatch_stack() > 0):  # fmt: skip
        return None
    state: list[Any] = [torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"),
                        torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
                        device, torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0,
                        ]  # fmt: skip
    for part in model.modules():
        # Hooks of the model itself are called around its `forward`.
        if (part is not model and has_hooks(part)) or (isinstance(part, MessagePassing) and _is_watched(part)):
            return None
        state += (id(part), part.__class__)
        for value in part.__dict__.values():
            kind = type(value)
            if kind in _SETTINGS:
                state.append(value)
            elif kind in _FUNCTIONS:
                state.append(id(value))
            elif kind in (list, tuple) and len(value) <= _MOST_ITEMS and all(type(item) in _SETTINGS for item in value):
                state.append(tuple(value))
            elif kind in _TENSORS:
                state.append((id(value), value._version if value.device != device else _read_memory(value)))
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None:
                if type(tensor) not in _TENSORS or tensor.layout is not torch.strided or tensor.device != device:
                    return None
                state.append((id(tensor), *_read_memory(tensor)))
    return tuple(state)


def _read_memory(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided:
        return (tensor._version,)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad


def list_tensors(model: torch.nn.Module) -> list[Tensor]:
    """List tensors that passes of a model read; their ids identify them while they are held."""
    own = [value for part in model.modules() for value in part.__dict__.values() if isinstance(value, Tensor)]
    return [*model.parameters(), *model.buffers(), *own]


def _is_watched(part: MessagePassing) -> bool:
    """Report whether a hook reads the messages of a convolution."""
    return bool(part.explain or part._propagate_forward_pre_hooks or part._propagate_forward_hooks
                or part._message_forward_pre_hooks or part._message_forward_hooks or part._aggregate_forward_pre_hooks
                or part._aggregate_forward_hooks or part._edge_update_forward_pre_hooks
                or part._edge_update_forward_hooks)  # fmt: skip


@contextmanager
def left_as_it_was(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Restore buffers of a model, the training mode of its modules, and random numbers at the end."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    modes = [(part, part.training) for part in model.modules()]
    drawn = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(drawn[0])
            np.random.set_state(drawn[1])
            for part, is_training in modes:
                part.training = is_training
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


class Traces:
    """Traces that a pass over `given` may leave, compared with the state before."""

    def __init__(self, model: torch.nn.Module, given: Sequence[Tensor]) -> None:
        self._model, self._given = model, given
        self._attributes, self._versions, self._draws = self._read()

    def find(self) -> str | None:
        """Return the trace that a pass since then has left; None without one."""
        attributes, versions, draws = self._read()
        for (name, part), before, after in zip(self._model.named_modules(), self._attributes, attributes, strict=False):
            for key in {**before, **after}:
                if before.get(key) != after.get(key):
                    return f"forward sets {key!r} of {type(part).__name__} {name!r}"
        if versions != self._versions:
            return "forward writes to its arguments"
        return None if draws == self._draws else "forward draws random numbers of the host"

    def _read(self) -> tuple[list[dict[str, Any]], list[int], list[Any]]:
        # Torch's own layers leave no relevant trace; LSTM records the addresses of its parameters.
        attributes = [
            {} if type(part).__module__.startswith("torch.nn.") else
            {key: (id(value), len(value) if isinstance(value, (list, dict, set)) else 0)
             for key, value in part.__dict__.items()}
            for part in self._model.modules()
        ]  # fmt: skip
        draws: list[Any] = [random.getstate(), str(np.random.get_state())]
        if any(tensor.is_cuda for tensor in self._given):
            draws.append(torch.get_rng_state().tolist())
        return attributes, [tensor._version for tensor in self._given], draws


def find_norm_over_nodes(model: torch.nn.Module, served: Container[torch.nn.Module] = ()) -> str | None:
    """Return the first module of a model that would read padding nodes, and its name; None without one.

    Args:
        model: The model.
        served: Modules that leave padding out.
    """
    for name, module in model.named_modules():
        if _mixes_rows(module) and module not in served:
            return f"{type(module).__name__} at {name!r}"
    return None


def _mixes_rows(module: torch.nn.Module) -> bool:
    if isinstance(module, torch.nn.LayerNorm):
        return False
    if isinstance(module, norm.LayerNorm):
        return bool(module.mode == "graph")
    return isinstance(module, _NormBase) or type(module).__module__.startswith("torch_geometric.nn.norm")
