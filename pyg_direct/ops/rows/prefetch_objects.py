"""Prefetch of tensors as Python's objects, before an attribute of each is read (see `kernels/rows/objects.py`)."""

from __future__ import annotations

import ctypes
import functools
import sys

import numpy as np
import torch

from pyg_direct.kernels.rows.objects import prefetch_objects_cpu

_WORD = 8


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
    offset = _find_offset()
    if offset is not None:
        prefetch_objects_cpu(read_addresses(tensors), offset)


@functools.cache
def _find_offset() -> int | None:
    """Find the bytes from a tensor's object to the address of its memory in C++; None if it is not there."""
    if sys.implementation.name != "cpython" or ctypes.sizeof(ctypes.c_void_p) != _WORD:
        return None
    examples = [torch.empty(1, device="cpu") for _ in range(2)]
    words = [(ctypes.c_int64 * (torch.Tensor.__basicsize__ // _WORD)).from_address(id(one)) for one in examples]
    places = [place for place in range(len(words[0]))
              if all(own[place] == one._cdata for own, one in zip(words, examples, strict=True))]  # fmt: skip
    return places[0] * _WORD if places else None
