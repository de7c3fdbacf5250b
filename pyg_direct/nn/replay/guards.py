"""Guards of replay: the state on which a model's passes depend, besides its arguments, so that equal ones can be
replayed.

`State` reads it, and `Outside` finds the values that the model's code reads besides. `Traces` finds, before a pass is
recorded, effects besides its result; a recorded pass would not repeat them. `ForeignReads` finds tensors of others,
whose memory a recording would not keep. `left_as_it_was` restores the model's buffers and the random numbers after a
trial. `find_norm_over_nodes` finds norms that look at all nodes of a batch together.
"""

from __future__ import annotations

import dis
import importlib
import inspect
import random
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, product
from operator import attrgetter, is_, itemgetter
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch_geometric.nn import MessagePassing, norm

from pyg_direct.nn.module_state import GUARD_NAMES
from pyg_direct.nn.trimming import has_global_hooks

# Attributes of modules that are compared by value.
SETTINGS = frozenset((bool, int, float, str, type(None)))
TENSORS = frozenset((Tensor, torch.nn.Parameter))
# Containers that may hold tensors.
CONTAINERS = frozenset((list, tuple, dict))
_MOST_ITEMS = 256


class State:
    """State of a model and of torch on which recorded passes depend.

    It is read in full once. Later reads compare the identities of all that it consists of, within microseconds, and
    read it again only if one has changed.

    Args:
        outside: Values that the model's code reads besides.
    """

    def __init__(self, outside: Outside) -> None:
        self._outside = outside
        # Of torch and of values outside, then all.
        self._around: tuple[Any, ...] = ()
        self._state: tuple[Any, ...] | None = None
        # Parts of the model with their classes and dictionaries, and what must stay empty, such as hooks.
        self._parts: list[torch.nn.Module] = []
        self._kinds: list[type] = []
        self._owns: list[dict[str, Any]] = []
        self._sizes: list[int] = []
        self._empty: list[Any] = []
        # Readers of the attributes that matter, and the attributes.
        self._getters: list[Callable[[Any], tuple[Any, ...]]] = []
        self._attributes: list[Any] = []
        # Containers, which show later changes, with the lengths, items and tensors that they had.
        self._views: list[Any] = []
        self._lengths: list[int] = []
        self._items: list[Any] = []
        self._tensors: list[Tensor] = []
        self._memory: list[int] = []
        # Of these, tensors of the model's device, each once, a check of their form, and others.
        self._near: list[Tensor] = []
        self._has_forms: Callable[..., bool] = _has_any_form
        self._far: list[Tensor] = []
        # Last call with arguments that may be given again as they are, of `read_call`.
        self.last: Any = None

    def read(self, model: Any, device: torch.device) -> tuple[Any, ...] | None:
        """Return the state; None if a hook or a mode watches, or a tensor is on another device."""
        around = _read_modes(device)
        if around is None:
            return None
        for read in self._outside.values:
            _read_value(read(), device, around, [], [])
        if self._state is None or self._around != tuple(around) or not self._is_unchanged(device):
            self._around = tuple(around)
            self._state = self._read_parts(model, device)
        return self._state

    def _is_unchanged(self, device: torch.device) -> bool:
        if list(map(len, self._owns)) != self._sizes:
            return False
        try:
            attributes = [get(own) for get, own in zip(self._getters, self._owns, strict=True)]
            memory = self._read_places()
        except (KeyError, RuntimeError):
            # An attribute is gone, or a tensor has no memory any more.
            return False
        return (
            all(map(is_, chain.from_iterable(attributes), self._attributes))
            and list(map(len, self._views)) == self._lengths
            and all(map(is_, chain.from_iterable(self._views), self._items))
            and list(map(type, self._parts)) == self._kinds
            and all(map(is_, map(_read_own, self._parts), self._owns))
            and not any(self._empty)
            and memory == self._memory
            and self._has_forms(*self._near)
        )

    def _read_places(self) -> list[int]:
        """Return the memory of tensors of the model's device, and the counts of writes of others."""
        return [*map(Tensor.data_ptr, self._near), *map(read_version, self._far)]

    def _read_parts(self, model: Any, device: torch.device) -> tuple[Any, ...] | None:
        """Read the state of a model in full, and how to find changes."""
        state: list[Any] = [*self._around]
        self._parts, self._empty, self._views, self._tensors = list(model.modules()), [], [], []
        self._getters, self._owns = [], []
        for part in self._parts:
            own, is_conv = part.__dict__, isinstance(part, MessagePassing)
            # Hooks of the model itself are called around its `forward`.
            kinds = (*(() if part is model else _HOOKS), *(_HOOKS_OF_MESSAGES if is_conv else ()))
            hooks = [own[kind] for kind in kinds if kind in own]
            if any(hooks) or _is_compiled(part) or (is_conv and part.explain):
                return None
            self._empty += hooks
            self._owns.append(own)
            internals = _INTERNALS_OF_CONVS if is_conv else _INTERNALS
            names = [name for name in own if name not in internals]
            # A program may replace `forward` of a part.
            read = [*_KEPT, *names, *(["forward"] if "forward" in own else [])]
            self._getters.append(itemgetter(*read))
            self._views += [part._parameters.values(), part._buffers.values(), part._modules.values()]
            state += (id(part), part.__class__, own.get("forward"))
            for name in names:
                _read_value(own[name], device, state, self._views, self._tensors)
            for tensor in (*part._parameters.values(), *part._buffers.values()):
                if tensor is not None:
                    if type(tensor) not in TENSORS or tensor.layout is not torch.strided or tensor.device != device:
                        return None
                    state.append((id(tensor), *_read_memory(tensor)))
                    self._tensors.append(tensor)
        self._kinds, self._sizes = list(map(type, self._parts)), list(map(len, self._owns))
        self._attributes = [value for get, own in zip(self._getters, self._owns, strict=True) for value in get(own)]
        # Most parts have no parameters, or buffers, or parts.
        self._empty += [view for view in self._views if not view]
        self._views = [view for view in self._views if view]
        self._lengths, self._items = list(map(len, self._views)), list(chain.from_iterable(self._views))
        near = {id(part): part for part in self._tensors if part.device == device and part.layout is torch.strided}
        self._near, self._far = list(near.values()), [part for part in self._tensors if id(part) not in near]
        self._memory, self._has_forms = self._read_places(), remember_forms(self._near)
        return tuple(state)


def _read_modes(device: torch.device) -> list[Any] | None:
    """Read the settings of torch on which recorded passes depend; None if a hook or a mode watches."""
    # torch calls the second ones for each operation.
    if has_global_hooks() or torch._C._len_torch_dispatch_stack() > 0 or torch.is_anomaly_enabled():
        return None
    # Also modes of functions; the default device is one.
    count = torch._C._len_torch_function_stack()
    functions = [torch._C._get_function_stack_at(place) for place in range(count)] if count else []
    if any(type(mode) is not DeviceContext for mode in functions):
        return None
    kind = device.type
    # In inference mode torch makes tensors that may not be written later. Torch's own functions around two of these
    # take longer.
    return [torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch._C._get_deterministic_algorithms(),
            torch._C._get_float32_matmul_precision(), torch.get_default_dtype(), torch.is_inference_mode_enabled(),
            *[mode.device for mode in functions], device,
            torch._C._cuda_getCurrentRawStream(device.index) if kind == "cuda" else 0]  # fmt: skip


def _read_value(value: Any, device: torch.device, state: list[Any], views: list[Any], tensors: list[Tensor]) -> None:
    """Append an attribute to a state: settings by value, tensors by their memory, and others by their identity.

    Args:
        views: Containers that were read, to which they are added.
        tensors: Tensors that were read, to which they are added.
    """
    kind = type(value)
    if kind in SETTINGS:
        state.append(value)
    elif kind in TENSORS:
        state.append((id(value), _read_tensor(value, device)))
        tensors.append(value)
    elif kind in CONTAINERS and len(value) <= _MOST_ITEMS:
        items = value.values() if kind is dict else value
        views.append(items)
        for item in items:
            _read_value(item, device, state, views, tensors)
    else:
        state.append(id(value))


read_version = attrgetter("_version")


def _has_any_form(*tensors: Tensor) -> bool:
    return True


def remember_forms(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Return a function that reports whether the same tensors, each given once, have the form of now.

    Their form is class, device, dtype, shape, strides, and the need of gradients. Their memory is not read.
    """
    return _guard(tensors) if tensors else _has_any_form


def _guard_by_torch(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Return the check of torch's own guard of tensors, which torch does not promise to keep.

    Raises:
        ImportError, AttributeError, TypeError: This torch has another one, or none.
    """
    guards: Any = importlib.import_module("torch._C._dynamo.guards")
    # Both names must be given.
    check: Callable[..., bool] = guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


_read_form = attrgetter("__class__", "device", "dtype", "shape", "requires_grad")


def _guard_by_forms(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Return a check that reads each property of the tensors, in any torch."""
    strides, forms = list(map(Tensor.stride, tensors)), list(map(_read_form, tensors))

    def has_forms(*again: Tensor) -> bool:
        return list(map(_read_form, again)) == forms and list(map(Tensor.stride, again)) == strides

    return has_forms


def _sees_changes(guard: Callable[[Sequence[Tensor]], Callable[..., bool]]) -> bool:
    """Report whether a guard sees changes of a small tensor, made and asked with and without gradients."""
    for is_graded, is_asked_graded in product((False, True), repeat=2):
        part = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.float32, device="cpu"))
        with torch.set_grad_enabled(is_graded):
            has_form = guard([part])
        with torch.set_grad_enabled(is_asked_graded):
            if not has_form(part) or has_form(part.detach()):
                return False
            kept = part.data
            for data in (kept.t(), kept[:1], kept.half()):
                part.data = data
                if has_form(part):
                    return False
            part.data = kept
            # A guard may know the need of gradients only while they are enabled.
            part.requires_grad_(False)
            if has_form(part):
                return False
    return True


def _choose_guard() -> Callable[[Sequence[Tensor]], Callable[..., bool]]:
    """Return torch's own guard if it sees all changes, otherwise the one that reads each property."""
    # For 38 tensors 2.7 us, instead of 11 (torch 2.13).
    try:
        return _guard_by_torch if _sees_changes(_guard_by_torch) else _guard_by_forms
    except Exception:
        # Of any class: its arguments may be others, or a call of it.
        return _guard_by_forms


_guard = _choose_guard()


def _read_tensor(tensor: Tensor, device: torch.device) -> Any:
    return tensor._version if tensor.device != device else _read_memory(tensor)


# Hooks of every module, and of a convolution, which read what they compute.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOKS_OF_MESSAGES = tuple(
    f"_{step}_forward{before}_hooks" for before in ("", "_pre")
    for step in ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
)  # fmt: skip


def _is_compiled(part: torch.nn.Module) -> bool:
    """Report whether torch compiles or scripts a module, whose code may change between passes."""
    return (isinstance(part, torch.jit.ScriptModule) or type(part).__module__.startswith("torch._dynamo")
            or part.__dict__.get("_compiled_call_impl") is not None)  # fmt: skip


# Attributes of every module, which are read in another way or change nothing.
_INTERNALS = (frozenset(vars(torch.nn.Module())) - {"training"} | {"_paths", "_unknown", "_replay", "forward", "train"}
              | {"_spec", "__prepare_scriptable__"} | GUARD_NAMES)  # fmt: skip
# Of a convolution, some are made with it, and others are read only if it is explained.
_INTERNALS_OF_CONVS = _INTERNALS | {
    *_HOOKS_OF_MESSAGES, "inspector", "_user_args", "_fused_user_args", "_edge_user_args", "_edge_mask", "_loop_mask",
    "_apply_sigmoid",
}  # fmt: skip
# Of these, attributes that hold others.
_KEPT = ("_parameters", "_buffers", "_modules")
_read_own = attrgetter("__dict__")
# Code of these packages reads no values of a program.
_LIBRARIES = frozenset(("torch", "torch_geometric", "pyg_direct", "numpy", "math", "typing", "functools"))
_SPEAKS = frozenset(("print", "input", "open"))
# Methods of a program's class that torch or PyG calls.
_ENTRIES = ("forward", "message", "aggregate", "update", "edge_update", "message_and_aggregate")


class Outside:
    """Values outside of a model that the program's own code in it reads, such as globals and settings in objects.

    Attributes:
        reason: Effect of that code which a replay would not repeat; None without one.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.values: list[Callable[[], Any]] = []
        self.reason: str | None = None
        self._seen: set[tuple[int, type | None]] = set()
        # Attributes that the code reads, of any object, and objects of which it may read them.
        self._names: set[str] = set()
        self._objects: list[Any] = []
        for part in model.modules():
            kind = type(part)
            if not _is_library(kind.__module__):
                for name in _ENTRIES:
                    self._read_function(getattr(kind, name, None), kind)
                for name, value in part.__dict__.items():
                    if name not in _INTERNALS:
                        self._read_object(value)
        for value in self._objects:
            self._follow(value)

    def _read_function(self, function: Any, kind: type | None) -> None:
        """Add the values that a function reads, or a method of a class and the methods that it calls."""
        function = inspect.unwrap(getattr(function, "fget", function)) if callable(function) else None
        if not isinstance(function, FunctionType) or _is_library(function.__module__):
            return
        if (id(function), kind) in self._seen:
            return
        self._seen.add((id(function), kind))
        for cell in function.__closure__ or ():
            self._read_global(partial(getattr, cell, "cell_contents", None))
        codes = [function.__code__]
        for code in codes:
            codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
            for step in dis.get_instructions(code):
                if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                    if step.argval in function.__globals__:
                        self._read_global(partial(function.__globals__.get, step.argval))
                    elif step.argval in _SPEAKS:
                        self.reason = f"forward calls {step.argval}"
                elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                    self._names.add(step.argval)
                    self._read_function(getattr(kind, step.argval, None), kind)

    def _read_global(self, read: Callable[[], Any]) -> None:
        value = read()
        if isinstance(value, FunctionType):
            self._read_function(value, None)
        elif not isinstance(value, (type, ModuleType)):
            self.values.append(read)
            self._read_object(value)

    def _read_object(self, value: Any) -> None:
        if isinstance(value, FunctionType):
            self._read_function(value, None)
        else:
            self._objects.append(value)

    def _follow(self, value: Any) -> None:
        """Add the attributes of an object that is neither of a library nor a module, and of objects that it holds."""
        kind = type(value)
        if kind is MethodType and _is_library(value.__func__.__module__):
            return
        if isinstance(value, _GENERATORS):
            self.reason = f"forward may draw from a {kind.__name__} of the host"
        if kind in CONTAINERS and len(value) <= _MOST_ITEMS:
            for item in value.values() if kind is dict else value:
                self._follow(item)
        if (kind in SETTINGS or isinstance(value, (type, ModuleType, FunctionType, Tensor, torch.nn.Module))
                or _is_library(kind.__module__) or (id(value), kind) in self._seen):  # fmt: skip
            return
        self._seen.add((id(value), kind))
        own = getattr(value, "__dict__", None)
        names = [name for base in kind.__mro__ for name in _list_slots(base)]
        # Held, so that its id is given to no other.
        self.values.append(partial(_read_attributes, value, own if isinstance(own, dict) else {}, names))
        if len(self.values) > _MOST_ITEMS:
            self.reason = "forward reads objects that hold many others"
            return
        # Classes with this method may read any attribute for a name.
        is_open = hasattr(kind, "__getattr__")
        for name, part in [*(own.items() if isinstance(own, dict) else ()),
                           *[(name, getattr(value, name, None)) for name in names]]:  # fmt: skip
            if is_open or name in self._names:
                self._follow(part)


# Sources of random numbers whose draws are not seen otherwise.
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)


def _list_slots(kind: type) -> list[str]:
    slots = kind.__dict__.get("__slots__", ())
    return [slots] if isinstance(slots, str) else [name for name in slots if not name.startswith("__")]


def _read_attributes(value: Any, own: dict[str, Any], names: list[str]) -> list[Any]:
    return [*own.values(), *[getattr(value, name, None) for name in names]]


def _is_library(name: str | None) -> bool:
    return (name or "").split(".")[0] in _LIBRARIES


def _read_memory(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided:
        return (tensor._version,)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad


def list_tensors(model: torch.nn.Module) -> list[Tensor]:
    """List tensors that passes of a model read; their ids identify them while they are held."""
    own: list[Tensor] = []
    for part in model.modules():
        for name, value in part.__dict__.items():
            if name not in _INTERNALS:
                _list_held(value, own)
    return [*model.parameters(), *model.buffers(), *own]


def _list_held(value: Any, tensors: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        tensors.append(value)
    elif type(value) in CONTAINERS and len(value) <= _MOST_ITEMS:
        for item in value.values() if isinstance(value, dict) else value:
            _list_held(item, tensors)


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
            for buffer, value in buffers:
                # Not counted as a write: a pass may have kept the buffer for its backward.
                buffer.data.copy_(value)


class ForeignReads(TorchDispatchMode):
    """Tensors that operations read while this is active, and that none of them made."""

    def __init__(self) -> None:
        super().__init__()
        self._made: set[int] = set()
        self._read: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # torch's mark of a tensor that it has just made of numbers, as for `x[mask] = 0`.
        given = () if func is torch.ops.aten.lift_fresh.default else tree_leaves((args, kwargs))
        for tensor in given:
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                place = tensor.untyped_storage()._cdata
                if place not in self._made:
                    self._read[place] = tensor
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                place = tensor.untyped_storage()._cdata
                if place not in self._read:
                    self._made.add(place)
        return out

    def find(self, known: Iterable[Tensor]) -> tuple[int, ...] | None:
        """Return the shape of a tensor that was read and is none of these; None without one."""
        places = {tensor.untyped_storage()._cdata for tensor in known if tensor.layout is torch.strided}
        return next((tuple(tensor.shape) for place, tensor in self._read.items() if place not in places), None)


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
    """Return the first module of a model that would read padding nodes, and its name; None without one."""
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
