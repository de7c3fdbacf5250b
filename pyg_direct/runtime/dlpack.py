"""Tensors over memory whose device is said, where torch would take that of the address.

Of memory that one GPU was given and another reads, torch makes a tensor of the first, and copies it whole where the
second is asked for. DLPack names the device beside the address.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

# Numbers of DLPack's `DLDeviceType`.
_KINDS = {"cpu": 1, "cuda": 2}


class _Head(ctypes.Structure):
    """How a `DLManagedTensor` begins."""

    _fields_ = (("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


def view_address(address: int, num_bytes: int, device: torch.device, owner: Any) -> Tensor:
    """All bytes from an address on as a tensor of `device`, uint8 `[num_bytes]`, without touching them.

    Args:
        address: Of memory that `device` reads.
        num_bytes: At least 1.
        device: The CPU, or a GPU with its index.
        owner: Kept as long as the tensor or a view of it.
    """
    buffer = (ctypes.c_uint8 * num_bytes).from_address(address)
    buffer._owner = owner  # type: ignore[attr-defined]
    # Torch's own capsule, whose end lets the buffer go.
    capsule = torch.utils.dlpack.to_dlpack(torch.frombuffer(buffer, dtype=torch.uint8))  # type: ignore[attr-defined]
    head = _Head.from_address(_find_pointer(capsule, b"dltensor"))
    assert head.data == address, f"DLPack begins with {head.data:#x}, not with the address {address:#x}"
    head.device_type, head.device_id = _KINDS[device.type], device.index or 0
    tensor: Tensor = torch.from_dlpack(capsule)  # type: ignore[attr-defined]
    return tensor


_find_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_find_pointer.restype, _find_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
