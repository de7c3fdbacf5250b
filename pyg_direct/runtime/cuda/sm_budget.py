"""How a GPU's multiprocessors are shared between reads over the link and a model's matrix products.

A read over the link lasts as long as a training step and keeps a few multiprocessors to itself. Products are made for
all of them: a block that finds no place starts when others end, and a product of one wave takes the time of two. cuBLAS
makes them for fewer where it is told so (`cublasSetSmCountTarget`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from pyg_direct.runtime.cuda.device import abilities

T = TypeVar("T")

# Multiprocessors that products leave for each that a read takes, as kernels that sample come beside both; how many they
# leave at least, and the share of all that they leave at most. On an H200, a replayed step of GraphSAGE with 20 % of
# the rows cached, which 4 of its 132 multiprocessors read, takes 2.32 ms where products are made for all, 2.11 ms where
# they leave 4, 6 or 8, 2.04 ms where they leave 10; beside 6 that read 2.31, 2.15 (6 or 8) and 2.10 ms (10). Alone it
# takes 1.85 to 1.88 ms. On an H100, where 6 read: 2.94 ms (4), 2.37 (6 or 8), 2.35 (10), 2.31 (12), 2.31 to 2.36 (14 to
# 24).
_LEFT_FOR_EACH, _LEAST_LEFT, _MOST_LEFT = 2, 10, 1 / 8

# Who reads -> (GPU, multiprocessors that a read takes).
_READERS: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()


def note_reader(reader: Any, index: int, multiprocessors: int) -> None:
    """Say that `reader` keeps `multiprocessors` of GPU `index` while it reads over the link, as long as it lives."""
    _READERS[reader] = index, multiprocessors


def forget_reader(reader: Any) -> None:
    """Say that it reads no more."""
    _READERS.pop(reader, None)


def count_spared(index: int | None) -> int:
    """Multiprocessors of GPU `index` that products had better leave to reads over the link, which follow each other."""
    taken = max((count for place, count in list(_READERS.values()) if place == index), default=0)
    wanted = max(_LEFT_FOR_EACH * taken, _LEAST_LEFT)
    return min(wanted, int(_MOST_LEFT * abilities(index).multiprocessors)) if taken else 0


@contextlib.contextmanager
def products_leave(count: int, device: torch.device) -> Iterator[None]:
    """Inside, cuBLAS makes the products of this thread and of its backward passes for `count` multiprocessors of a GPU
    fewer. Where there is no cuBLAS, or `count` is 0, for all.
    """
    if count == 0 or _find_cublas() is None:
        yield
        return
    target = max(1, abilities(device.index).multiprocessors - count)
    with torch.cuda.device(device):
        before = _set_target(target), _run_in_backward(device, lambda: _set_target(target))
        try:
            yield
        finally:
            _set_target(before[0])
            _run_in_backward(device, lambda: _set_target(before[1]))


def _set_target(multiprocessors: int) -> int:
    """Set what products of the calling thread are made for, 0 for all; returns what it was."""
    cublas, handle, before = _find_cublas(), torch.cuda.current_blas_handle(), ctypes.c_int()
    assert cublas is not None, "asked before"
    for status in (cublas.cublasGetSmCountTarget(ctypes.c_void_p(handle), ctypes.byref(before)),
                   cublas.cublasSetSmCountTarget(ctypes.c_void_p(handle), multiprocessors)):  # fmt: skip
        assert status == 0, f"cuBLAS returned {status}"
    return before.value


def _run_in_backward(device: torch.device, function: Callable[[], T]) -> T:
    """Call a function in the thread of a GPU that runs backward passes, which has a handle of its own."""
    results: list[T] = []
    with torch.enable_grad():
        number = torch.zeros((), device=device, requires_grad=True) * 1
        number.register_hook(lambda gradient: results.append(function()))
        number.backward()
    return results[0]


@functools.cache
def _find_cublas() -> ctypes.CDLL | None:
    """The library that torch has loaded; None where there is none, or one that knows no targets."""
    major = str(torch.version.cuda or "").partition(".")[0]
    name = f"cublas64_{major}.dll" if sys.platform == "win32" else f"libcublas.so.{major}"
    try:
        library = ctypes.CDLL(name)
    except OSError:
        return None
    return library if hasattr(library, "cublasSetSmCountTarget") else None
