"""`Tensor.to`, where a tensor that is unified goes elsewhere, or one from elsewhere becomes unified."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_direct.errors import DeviceError
from pyg_direct.features.placement import run_copy, unified_tensors

NAME = "unified"
# Names of the device, and what they say about `propagatedToCUDA`.
_HINTS = {NAME: None, f"{NAME}:0": True, f"{NAME}:1": False}


def read_hint(name: str) -> bool | None:
    """What a name of the device says about `propagatedToCUDA`, if anything.

    Raises:
        DeviceError: no such name.
    """
    if name not in _HINTS:
        raise DeviceError(f"device must be one of {', '.join(_HINTS)}, got {str(name)!r}")
    return _HINTS[name]


# Compiled programs call it as it is, between their graphs.
@torch.compiler.disable
def run_to(source: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`source.to(...)`, in any of its forms, where `source` is unified or the arguments name what is.

    Raises:
        DeviceError: no such device, or `source` is not strided.
    """
    if source.layout is not torch.strided:
        raise DeviceError(f"device={NAME!r} needs a strided tensor, got one of layout {source.layout}")
    target, args, kwargs = _read_target(args, kwargs)
    # Torch reads its arguments and says what comes out.
    before = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta")
    after = before.to(*args, **kwargs)
    cls = unified_tensors().UnifiedTensor
    is_unified = isinstance(source, cls)
    if isinstance(target, torch.device):
        made = Tensor.to(source, target, after.dtype, copy=True)
        wanted = kwargs.get("memory_format") or torch.preserve_format
        return made if wanted is torch.preserve_format else made.contiguous(memory_format=wanted)
    hint = target.propagated if isinstance(target, cls) else target
    hint = hint if hint is not None else not is_unified or source.propagated  # type: ignore[attr-defined]
    if is_unified and after is before and hint == source.propagated:  # type: ignore[attr-defined]
        return source
    strides = torch.empty_like(after).stride()
    if torch.is_grad_enabled() and source.requires_grad and (after.is_floating_point() or after.is_complex()):
        made = source if source.dtype == after.dtype else Tensor.to(source, after.dtype)
        return _Move.apply(made, strides, hint)  # type: ignore[no-any-return]
    return _copy(source, after.dtype, strides, hint)


def _read_target(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Where to go, and the arguments with torch's `meta` for it: a device, a unified tensor or a hint."""
    kwargs = dict(kwargs)
    first = args[0] if args else kwargs.pop("tensor", None)
    rest = args[1:]
    if first is None and "device" in kwargs:
        first = kwargs.pop("device")
    if first is None or isinstance(first, torch.dtype):
        return None, args, kwargs
    if isinstance(first, Tensor):
        target = first if isinstance(first, unified_tensors().UnifiedTensor) else first.device
        return target, ("meta", first.dtype, *rest), kwargs
    if isinstance(first, str) and first.startswith(NAME):
        return read_hint(first), ("meta", *rest), kwargs
    return torch.device(first), ("meta", *rest), kwargs


def _copy(source: Any, dtype: torch.dtype, strides: Any, hint: bool) -> Any:
    unified = unified_tensors()
    if isinstance(source, unified.UnifiedTensor):
        gpu = source.memory.device
    else:
        gpu = unified.gpu_for_unified(source.device if source.is_cuda else None)
    return run_copy(unified.empty_unified(source.shape, dtype, gpu, hint, strides), source)


class _Move(torch.autograd.Function):
    """A copy in unified memory; its gradient goes back to where the tensor came from."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, strides: Any, hint: bool) -> Tensor:
        ctx.device = None if isinstance(source, unified_tensors().UnifiedTensor) else source.device
        return _copy(source, source.dtype, strides, hint)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] if ctx.device is None else grads[0].to(ctx.device), None, None
