"""The device `unified`, by its name in torch: opt-in, as it changes things for a whole process."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from pyg_direct.errors import CudaError, DeviceError
from pyg_direct.features import unified
from pyg_direct.features.placement import run_copy
from pyg_direct.features.unified import UnifiedTensor, empty_unified, gpu_for_unified
from pyg_direct.runtime.device import bind_thread
from pyg_direct.runtime.driver import call, load_driver

NAME = "unified"
# Libraries of torch's dispatcher live as long as these objects.
_KEPT: list[Any] = []


def enable_unified_device() -> None:
    """Make `device="unified"` a device of torch, with PyTorch-Direct's spelling; calls after the first do nothing.

    `x.to("unified")`, `torch.ones(128, device="unified")` and the other factories then make a `UnifiedTensor`, and
    every tensor has `is_unified`, `memAdvise` and `set_propagatedToCUDA`, the last two of which raise RuntimeError for
    other tensors. It takes torch's one place for a backend from outside (PrivateUse1) for the rest of the process.
    `torch.accelerator` goes on to name the GPU, and memory is page-locked for it, as before. Inside, torch takes
    `unified` for the accelerator of the process: a backward pass no longer moves to the CUDA streams of its forward
    pass, so train on one stream (the default one, as programs do that set none), or use `to_unified` without this call.
    Call it before the first backward pass of the process, at which torch fixes the devices that gradients can have.

    Raises:
        DeviceError: torch is older than 2.10, or another backend has that place.
    """
    if _KEPT:
        return
    try:
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
    except ImportError as error:
        raise DeviceError(f"device='unified' needs torch 2.10 or newer, this is {torch.__version__}; to_unified and "
                          "UnifiedTensor work without") from error  # fmt: skip
    owner: str = torch._C._get_privateuse1_backend_name()
    if owner != "privateuseone" or hasattr(torch, owner):
        raise DeviceError(f"device='unified' needs torch's place for a backend from outside, which {owner!r} has; "
                          "to_unified and UnifiedTensor work without")  # fmt: skip
    accelerator, is_available = torch.accelerator.current_accelerator(), torch.accelerator.is_available()
    _setup_privateuseone_for_python_backend(NAME)
    unified._DEVICE[0] = torch.device(NAME, 0)
    _KEPT.extend(_register_kernels())
    _add_methods()
    _keep_accelerator(accelerator, is_available)


def unified_device(*, propagatedToCUDA: bool = True) -> torch.device:  # noqa: N803
    """The device for `torch.ones(3, device=...)` and `x.to(...)`, with a hint that `torch.device` cannot take: the
    paper's `torch.device("unified", propagatedToCUDA=False)`.

    Raises:
        DeviceError: `enable_unified_device` was not called.
    """
    if not _KEPT:
        raise DeviceError("device='unified' needs a call of enable_unified_device first")
    # The index carries the hint; tensors made with it all say `unified:0`.
    return torch.device(NAME, 0 if propagatedToCUDA else 1)


def _register_kernels() -> list[torch.library.Library]:
    fallback, kernels = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    fallback.fallback(_make, "PrivateUse1")
    # Called past `__torch_dispatch__` by torch.tensor(..., device="unified").
    kernels.impl("_copy_from", lambda source, target, non_blocking=False: run_copy(target, source), "PrivateUse1")
    return [fallback, kernels]


def _make(op: Any, *args: Any, **kwargs: Any) -> Any:
    """A factory with `device="unified"`: made by the CPU into unified memory."""
    device = kwargs.get("device")
    if device is None or torch.device(device).type != NAME:
        raise NotImplementedError(f"{op} is not offered for unified tensors")
    propagated = torch.device(device).index in (None, 0)
    plain = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    like = op(*args, **{**plain, "device": torch.device("meta")})
    made = empty_unified(like.shape, like.dtype, gpu_for_unified(), propagated, like.stride())
    if op.overloadpacket not in (torch.ops.aten.empty, torch.ops.aten.empty_strided):
        made.host_view.copy_(op(*args, **{**plain, "device": torch.device("cpu")}))
    return made


def _add_methods() -> None:
    def refuse(name: str) -> Any:
        def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError(f"{name} needs a unified tensor, got one on {self.device}")

        method.__name__ = method.__qualname__ = name
        return method

    for name in ("memAdvise", "set_propagatedToCUDA"):
        setattr(Tensor, name, refuse(name))
    UnifiedTensor.__module__ = "pyg_direct"


def _keep_accelerator(accelerator: torch.device | None, is_available: bool) -> None:
    """Let `torch.accelerator` and page-locking, which DataLoader(pin_memory=True) does, go on with the GPU."""
    # Some builds of torch name the accelerator that they are made for on machines without one.
    there = accelerator if is_available else None
    torch.accelerator.current_accelerator = functools.partial(_tell_accelerator, accelerator, there)  # type: ignore[assignment]
    torch.accelerator.is_available = lambda: is_available
    Tensor.pin_memory = _pin_memory  # type: ignore[assignment, method-assign]
    Tensor.is_pinned = _is_pinned  # type: ignore[assignment, method-assign]


def _tell_accelerator(accelerator: torch.device | None, there: torch.device | None,
                      check_available: bool = False) -> torch.device | None:  # fmt: skip
    return there if check_available else accelerator


def _is_pinned(self: Tensor, device: Any = None) -> bool:
    """Whether the tensor lies in page-locked memory, as the driver knows it."""
    if isinstance(self, UnifiedTensor) or self.device.type != "cpu" or self.numel() == 0:
        return False
    if not torch.cuda.is_initialized():
        return False
    bind_thread(torch.cuda.current_device())
    driver = load_driver()
    try:
        kind = call("cuPointerGetAttribute", driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                    self.data_ptr())  # fmt: skip
    except CudaError:
        # Ordinary memory, which the driver has not heard of.
        return False
    return int(kind) == int(driver.CUmemorytype.CU_MEMORYTYPE_HOST)


def _pin_memory(self: Tensor, device: Any = None) -> Tensor:
    """The tensor in page-locked memory; without a GPU, the tensor itself."""
    if isinstance(self, UnifiedTensor) or not torch.cuda.is_available() or self.is_pinned():
        return self
    return torch.empty_like(self, pin_memory=True, memory_format=torch.preserve_format).copy_(self)
