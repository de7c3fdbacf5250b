"""How a GPU's multiprocessors are shared between reads over the link and a model's matrix products.

A read over the link lasts as long as a training step and occupies a few multiprocessors. By default cuBLAS plans
products for all of them. A block without a free multiprocessor starts when others end, and a product of one wave takes
the time of two. cuBLAS plans for fewer if it is given a target (`cublasSetSmCountTarget`).
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

# Multiprocessors that products leave for each that a read takes, because sampling kernels run beside both. Then the
# least that they leave, and the largest share of all that they leave. Measured on an H200 of 132 multiprocessors with a
# replayed step of GraphSAGE, 20 % of the rows cached (ms a step):
# - Without a reader: 1.85 to 1.88.
# - 4 read: products leave none 2.32; 4, 6 or 8 2.11; 10 2.04.
# - 6 read: none 2.31; 6 or 8 2.15; 10 2.10.
# - On an H100, 6 read: 4 2.94; 6 or 8 2.37; 10 2.35; 12 2.31; 14 to 24 2.31 to 2.36.
_LEFT_FOR_EACH, _LEAST_LEFT, _MOST_LEFT = 2, 10, 1 / 8

# Reader -> (GPU, multiprocessors that a read takes).
_READERS: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()


def note_reader(reader: Any, index: int, multiprocessors: int) -> None:
    """Record that `reader` occupies `multiprocessors` of GPU `index` while it reads over the link, as long as it
    lives.
    """
    _READERS[reader] = index, multiprocessors


def forget_reader(reader: Any) -> None:
    """Remove a reader that reads no more."""
    _READERS.pop(reader, None)


def count_spared(index: int | None) -> int:
    """Return the multiprocessors of GPU `index` that products should leave to reads over the link, which follow each
    other.
    """
    taken = max((count for place, count in list(_READERS.values()) if place == index), default=0)
    wanted = max(_LEFT_FOR_EACH * taken, _LEAST_LEFT)
    return min(wanted, int(_MOST_LEFT * abilities(index).multiprocessors)) if taken else 0


@contextlib.contextmanager
def products_leave(count: int, device: torch.device) -> Iterator[None]:
    """Make cuBLAS plan the products of this thread and of its backward passes for `count` multiprocessors fewer. If
    there is no cuBLAS, or `count` is 0, it plans for all.
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
            # In this order, as backward may run in this thread.
            _run_in_backward(device, lambda: _set_target(before[1]))
            _set_target(before[0])


def _set_target(multiprocessors: int) -> int:
    """Set the multiprocessors that products of the calling thread are planned for, 0 for all; returns the old
    number.
    """
    cublas, handle, before = _find_cublas(), torch.cuda.current_blas_handle(), ctypes.c_int()
    assert cublas is not None, "asked before"
    for status in (cublas.cublasGetSmCountTarget(ctypes.c_void_p(handle), ctypes.byref(before)),
                   cublas.cublasSetSmCountTarget(ctypes.c_void_p(handle), multiprocessors)):  # fmt: skip
        assert status == 0, f"cuBLAS returned {status}"
    return before.value


def _run_in_backward(device: torch.device, function: Callable[[], T]) -> T:
    """Call a function in the thread that runs backward passes; a thread of torch has its own cuBLAS handle."""
    results: list[T] = []
    with torch.enable_grad():
        number = torch.zeros((), device=device, requires_grad=True) * 1
        number.register_hook(lambda gradient: results.append(function()))
        number.backward()
    return results[0]


@functools.cache
def _find_cublas() -> ctypes.CDLL | None:
    """Return the cuBLAS library that torch has loaded; None if there is none, or if it has no such target."""
    major = str(torch.version.cuda or "").partition(".")[0]
    name = f"cublas64_{major}.dll" if sys.platform == "win32" else f"libcublas.so.{major}"
    try:
        library = ctypes.CDLL(name)
    except OSError:
        return None
    return library if hasattr(library, "cublasSetSmCountTarget") else None
