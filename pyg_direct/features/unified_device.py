"""The device `unified`, by its name in torch: opt-in, because it inspects every torch call of its thread."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from pyg_direct.errors import DeviceError
from pyg_direct.features.unified_tensor import NAME, UnifiedTensor, empty_unified, gpu_for_unified, read_hint, run_to

_to, _module_to, _device = Tensor.to, torch._C._nn._parse_to, torch.device
# They leave their result uninitialized.
_EMPTY = {torch.empty, torch.empty_strided, torch.empty_permuted, torch.empty_like, Tensor.new_empty,
          Tensor.new_empty_strided}  # fmt: skip
# They write into memory that they are given.
_FILL = {torch.ones, torch.zeros, torch.full, torch.arange, torch.linspace, torch.logspace, torch.eye, torch.rand,
         torch.randn, torch.randint, torch.randperm}  # fmt: skip
_thread = threading.local()


def enable_unified_device() -> None:
    """Make `device="unified"` a device of torch, with PyTorch-Direct's spelling, for the thread that calls.

    `x.to("unified")`, `torch.ones(128, device="unified")` and the other factories then make a `UnifiedTensor`. Every
    tensor gets `is_unified`, `memAdvise` and `set_propagatedToCUDA`; the last two raise RuntimeError for other tensors.
    `torch.device("unified")` gives the name, a `str`, because no `torch.device` can express it; the `device` of a
    unified tensor is `cpu`.

    Calls after the first have no effect. Each thread or process that uses the name calls it; in others torch raises an
    error about an unknown device. It sets up a `TorchFunctionMode`, as `torch.set_default_device` does. The mode sees
    each torch call from Python, and costs as much: about 1 us for each, 3 us for torch functions that are written in
    Python. `to_unified` makes the same tensors without it.

    It is not a custom torch backend (PrivateUse1), because such a registration applies to the whole process.
    `torch.accelerator` would then name `unified`, and `pin_memory` would raise NotImplementedError, also from
    `DataLoader(pin_memory=True)`. With a GPU, backward passes lost the stream order that torch gives them.

    Example:
        >>> enable_unified_device()
        >>> torch.ones(3, device="unified").is_unified
        True
    """
    if any(isinstance(mode, _UnifiedNames) for mode in _get_current_function_mode_stack()):
        return
    _add_methods()
    # Below the modes of `with` blocks, which remove the top mode at their end, and above torch's default device, which
    # needs the lowest position.
    lowest = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    modes = [_pop_mode() for _ in _get_current_function_mode_stack()][::-1]
    modes.insert(1 if modes[:1] == [lowest] else 0, _UnifiedNames())
    for mode in modes:
        _push_mode(mode)
    _thread.is_enabled = True


def unified_device(*, propagatedToCUDA: bool = True) -> str:  # noqa: N803
    """Return the device for `torch.ones(3, device=...)` and `x.to(...)`, with a hint that `torch.device` cannot take:
    the paper's `torch.device("unified", propagatedToCUDA=False)`.

    Args:
        propagatedToCUDA: See `UnifiedTensor`.

    Returns:
        str: `"unified:0"`, or `"unified:1"` for tensors that are not propagated.

    Raises:
        DeviceError: `enable_unified_device` was not called in this thread.

    Example:
        >>> enable_unified_device()
        >>> torch.ones(3, device=unified_device(propagatedToCUDA=False)).propagated
        False
    """
    if not getattr(_thread, "is_enabled", False):
        raise DeviceError("device='unified' needs a call of enable_unified_device in this thread first")
    return f"{NAME}:{0 if propagatedToCUDA else 1}"


class _UnifiedNames(TorchFunctionMode):
    """Mode that removes `unified` names from torch calls."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _to:
            return _run_to(args, kwargs or {})
        if func is _device or func is _module_to:
            return _read_name(func, args, kwargs or {})
        if not kwargs:
            return func(*args)
        if "device" in kwargs and _is_name(kwargs["device"]):
            return _make(func, args, kwargs)
        return func(*args, **kwargs)


def _is_name(device: Any) -> bool:
    return isinstance(device, str) and device.startswith(NAME)


def _run_to(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = args[1] if len(args) > 1 else kwargs.get("device", kwargs.get("tensor"))
    if isinstance(target, UnifiedTensor) or _is_name(target):
        return run_to(*args, **kwargs)
    return _to(*args, **kwargs)


def _read_name(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle `torch.device(...)`, or the arguments of `Module.to`."""
    first = args[0] if args else kwargs.get("device", kwargs.get("type"))
    if not _is_name(first):
        return func(*args, **kwargs)
    if func is _module_to:
        raise DeviceError(f"Module.to must name cpu or a GPU, where parameters are trained, got {str(first)!r}")
    index = args[1] if len(args) > 1 else kwargs.get("index")
    name = str(first) if index is None else f"{first}:{index}"
    read_hint(name)
    return name


@torch.compiler.disable
def _make(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make the result of a factory with `device="unified"`: made by the CPU in unified memory, or copied there."""
    made: Any
    hint = read_hint(kwargs["device"]) is not False
    plain = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory", "requires_grad")}
    if "out" in kwargs and not isinstance(kwargs["out"], UnifiedTensor | None):
        raise DeviceError(f"out must be a unified tensor for device={NAME!r}, got one on {kwargs['out'].device}")
    if kwargs.get("out") is None and (func in _EMPTY or func in _FILL):
        plain.pop("out", None)
        like = func(*args, **plain, device="meta")
        _check(func, like)
        made = empty_unified(like.shape, like.dtype, gpu_for_unified(), hint, like.stride())
        if func in _FILL:
            func(*args, **{**plain, "dtype": like.dtype, "device": "cpu"}, out=made.host_view)
    else:
        made = func(*args, **plain, device="cpu")
        _check(func, made)
        if not isinstance(made, UnifiedTensor):
            made = run_to(made, f"{NAME}:{0 if hint else 1}")
    return made.requires_grad_() if kwargs.get("requires_grad") else made


def _check(func: Any, made: Any) -> None:
    if not isinstance(made, Tensor) or made.layout is not torch.strided:
        raise DeviceError(f"device={NAME!r} is for calls that make strided tensors, got {func.__name__}, which made "
                          f"{made.layout if isinstance(made, Tensor) else type(made).__name__}")  # fmt: skip


def _add_methods() -> None:
    def refuse(name: str) -> Any:
        def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError(f"{name} needs a unified tensor, got one on {self.device}")

        method.__name__ = method.__qualname__ = name
        return method

    for name in ("memAdvise", "set_propagatedToCUDA"):
        setattr(Tensor, name, refuse(name))
    Tensor.is_unified = False  # type: ignore[attr-defined]
