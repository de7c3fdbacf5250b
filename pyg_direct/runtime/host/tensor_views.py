"""Tensor views over memory: on a named device, as bytes, or outside inference mode.

`view_address` makes a tensor over memory with a given device, through DLPack, which carries the device beside the
address. Torch otherwise derives the device from the address. If one GPU owns the memory and another reads it, torch
makes a tensor of the first GPU. It then copies the whole tensor if the second is requested.

`as_bytes` views tensors as the bytes that they lie in. `ordinary_tensors` makes tensors that outlive a user's
`torch.inference_mode`.

`LazyDict`: a dictionary whose items, such as views of a batch's memory, are made at the first use.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import ContextDecorator
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

# Numbers of DLPack's `DLDeviceType`.
_KINDS = {"cpu": 1, "cuda": 2}


class _Head(ctypes.Structure):
    """First fields of a `DLManagedTensor`."""

    _fields_ = (("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


def view_address(address: int, num_bytes: int, device: torch.device, owner: Any) -> Tensor:
    """View all bytes from an address on as a tensor of `device`, uint8 `[num_bytes]`, without touching them.

    Args:
        num_bytes: At least 1.
        device: The CPU, or a GPU with its index.
    """
    buffer = (ctypes.c_uint8 * num_bytes).from_address(address)
    buffer._owner = owner  # type: ignore[attr-defined]
    # Torch's own capsule, whose destructor releases the buffer.
    capsule = torch.utils.dlpack.to_dlpack(torch.frombuffer(buffer, dtype=torch.uint8))  # type: ignore[attr-defined]
    head = _Head.from_address(_find_pointer(capsule, b"dltensor"))
    assert head.data == address, f"DLPack begins with {head.data:#x}, not with the address {address:#x}"
    head.device_type, head.device_id = _KINDS[device.type], device.index or 0
    tensor: Tensor = torch.from_dlpack(capsule)  # type: ignore[attr-defined]
    return tensor


_find_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_find_pointer.restype, _find_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


# Arrays in one run of bytes begin at multiples of it, which views of the widest dtype, complex128, need.
ALIGNMENT = 16
_Sizes = TypeVar("_Sizes", int, np.ndarray)


def align(num_bytes: _Sizes) -> _Sizes:
    """Return the offset of the next array after one of so many bytes."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def as_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor of any dtype as bytes, uint8 `[n]`, over the same memory."""
    flat = tensor.detach().view(-1)
    if flat.numel() == 1:
        # torch calls one item contiguous whatever its stride.
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8)


class ordinary_tensors(ContextDecorator):  # noqa: N801
    """`with ordinary_tensors():` makes tensors of the block writable, and usable in any later backward.

    Buffers, plans and placed rows are often first needed by an evaluation in `torch.inference_mode`, whose tensors
    training could not use.
    """

    def __enter__(self) -> None:
        self._modes: list[Any] = []
        if torch.is_inference_mode_enabled():
            self._modes = [torch.inference_mode(False), torch.no_grad()]
        for mode in self._modes:
            mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)

    def _recreate_cm(self) -> ordinary_tensors:
        # One for each call, because calls nest.
        return ordinary_tensors()


def version_of(tensor: Any) -> int:
    """Return a number that changes with every write to a tensor; always 0 in `torch.inference_mode`."""
    if not isinstance(tensor, torch.Tensor) or tensor.is_inference():
        return 0
    return tensor._version


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
# Of all dictionaries: their items are made in microseconds, by one thread.
_MAKING = threading.RLock()
if hasattr(os, "register_at_fork"):
    # A thread of the parent may hold it.
    os.register_at_fork(after_in_child=lambda: globals().update(_MAKING=threading.RLock()))


class _Made(dict[_Key, _Value]):
    """Dictionary that is copied and pickled as one of Python's own."""

    __slots__ = ("_make",)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)


class LazyDict(_Made[_Key, _Value]):
    """Dictionary whose items are made at the first use; afterwards it is as fast as any."""

    __slots__ = ()

    def __init__(self, make: Callable[[], Mapping[_Key, _Value]]) -> None:
        self._make: Callable[[], Mapping[_Key, _Value]] = make

    def when_made(self, change: Callable[[Mapping[_Key, _Value]], None]) -> None:
        """Change the items of a dictionary that was not used yet, as soon as they are made."""
        make = self._make

        def make_changed() -> Mapping[_Key, _Value]:
            items = make()
            change(items)
            return items

        self._make = make_changed

    def _fill(self) -> None:
        with _MAKING:
            if type(self) is LazyDict:
                if torch.is_inference_mode_enabled():
                    with ordinary_tensors():
                        items = self._make()
                else:
                    items = self._make()
                dict.update(self, items)
                # Last: another thread may look meanwhile.
                self._make, self.__class__ = _none, _Made  # type: ignore[assignment]


def _none() -> dict[Any, Any]:
    return {}


def _filled(name: str) -> Callable[..., Any]:
    """Return a method of `dict` that makes the items first."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if type(self) is LazyDict:
            self._fill()
        return getattr(_Made, name)(self, *args, **kwargs)

    return method


for _name in ("__contains__", "__delitem__", "__eq__", "__getitem__", "__ior__", "__iter__", "__len__", "__ne__",
              "__or__", "__reduce_ex__", "__repr__", "__reversed__", "__ror__", "__setitem__", "clear", "copy", "get",
              "items", "keys", "pop", "popitem", "setdefault", "update", "values"):  # fmt: skip
    setattr(LazyDict, _name, _filled(_name))
