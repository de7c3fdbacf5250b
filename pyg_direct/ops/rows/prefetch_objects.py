"""Prefetch of tensors as Python's objects, before an attribute of each is read (see `kernels/rows/objects.py`)."""

from __future__ import annotations

import ctypes
import functools
import sys

import numpy as np
import torch

from pyg_direct.kernels.rows.objects import prefetch_objects_cpu

_WORD = 8
# Words at the begin of a tensor's memory, all of which it has.
_WORDS = 8


class _Addresses:
    """Addresses of the objects of an array, int64, without a copy."""

    def __init__(self, objects: np.ndarray) -> None:
        # NumPy keeps this object as long as its view.
        self._objects = objects
        self.__array_interface__ = {"data": (objects.ctypes.data, True), "typestr": "<i8", "shape": objects.shape,
                                    "version": 3}  # fmt: skip


def read_addresses(objects: np.ndarray) -> np.ndarray:
    """Read the addresses of objects, int64 `[n]`: equal ones are of one object.

    Args:
        objects: Contiguous, of dtype object; its memory is the result's.
    """
    return np.asarray(_Addresses(objects))


def prefetch_tensors(tensors: np.ndarray) -> None:
    """Ask for the memory that holds the number of writes to each tensor.

    Small tensors that were made one by one lie far apart, so that Python would wait for each of them three times.

    Args:
        tensors: Contiguous, of dtype object, with tensors only; some hundreds, which the processor's cache holds.
    """
    places = _find_places()
    if places is not None:
        prefetch_objects_cpu(read_addresses(tensors), *places)


@functools.cache
def _find_places() -> tuple[int, int] | None:
    """Find the bytes from a tensor's object to the address of its memory in C++, and from there to the address of its
    counter of writes; None if they are elsewhere in this Python or torch.
    """
    if sys.implementation.name != "cpython" or ctypes.sizeof(ctypes.c_void_p) != _WORD:
        return None
    examples = [torch.empty(1, device="cpu") for _ in range(2)]
    words = [_read_words(id(one), torch.Tensor.__basicsize__ // _WORD) for one in examples]
    to_tensor = [place for place in range(len(words[0]))
                 if all(own[place] == one._cdata for own, one in zip(words, examples, strict=True))]  # fmt: skip
    # A detached tensor counts its writes together with the tensor, and `.data` does not; both share the memory.
    own = examples[0]
    held = own.detach(), own.data
    first, detached, apart = (_read_words(one._cdata, _WORDS) for one in (own, *held))
    to_counter = [place for place in range(_WORDS) if first[place] == detached[place] != apart[place]]
    return (to_tensor[0] * _WORD, to_counter[0] * _WORD) if to_tensor and to_counter else None


def _read_words(address: int, count: int) -> list[int]:
    """Read the int64 at an address."""
    return list((ctypes.c_int64 * count).from_address(address))
