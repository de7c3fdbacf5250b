"""CUDA graphs of work that torch enqueues on a GPU, with the settings that a capture needs.

`CapturedGraph` is a sequence of kernels, captured once and replayed with one submission. `waits_refused` refuses, and
`find_wait` finds, work that waits for the GPU.
`products_leave` leaves multiprocessors to reads beside a model's products.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from pyg_direct.errors import describe
from pyg_direct.runtime.cuda.device import abilities, bind_thread, call, load_driver, tolerate_captures

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
    """Record that `reader` occupies `multiprocessors` of GPU `index` while it lives and reads over the link."""
    _READERS[reader] = index, multiprocessors


def forget_reader(reader: Any) -> None:
    """Remove a reader that reads no more."""
    _READERS.pop(reader, None)


def count_spared(index: int | None) -> int:
    """Return the multiprocessors of GPU `index` that products should leave to reads over the link."""
    taken = max((count for place, count in list(_READERS.values()) if place == index), default=0)
    wanted = max(_LEFT_FOR_EACH * taken, _LEAST_LEFT)
    return min(wanted, int(_MOST_LEFT * abilities(index).multiprocessors)) if taken else 0


@contextlib.contextmanager
def products_leave(count: int, device: torch.device) -> Iterator[None]:
    """Make cuBLAS, if it is there, plan products of this thread and its backward for `count` multiprocessors fewer."""
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
    """Set the multiprocessors of products of the calling thread, 0 for all; returns the old number."""
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


def fill_words(tensor: torch.Tensor, word: int, stream: int) -> None:
    """Enqueue: set every 32-bit word of a tensor (done at once for one on the CPU)."""
    if not tensor.is_cuda:
        tensor.view(torch.int32).fill_(word)
        return
    call("cuMemsetD32Async", tensor.data_ptr(), word, tensor.numel() * tensor.element_size() // 4, stream)


class CapturedGraph:
    """The work that `record(stream)` enqueues, as one replayable graph.

    Capture runs on a separate stream in thread-local mode, so that it neither sees nor disturbs other streams and
    threads. The tensors used must outlive the graph and keep their addresses.
    """

    def __init__(self, record: Callable[[int], None], index: int) -> None:
        driver = load_driver()
        self.index = index
        with torch.cuda.device(index):
            bind_thread(index)
            stream = call("cuStreamCreate", int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
            collects = gc.isenabled()
            # If the collector freed tensors meanwhile, torch would ask for events, which ends a capture.
            gc.disable()
            try:
                mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
                call("cuStreamBeginCapture", stream, mode)
                try:
                    record(int(stream))
                finally:
                    graph = call("cuStreamEndCapture", stream)
                self.num_nodes = int(driver.cuGraphGetNodes(graph)[2])
                self._executable: Any = call("cuGraphInstantiate", graph, 0)
                call("cuGraphDestroy", graph)
            finally:
                if collects:
                    gc.enable()
                call("cuStreamDestroy", stream)
        self._launch = driver.cuGraphLaunch

    def replay(self, stream: int | None = None) -> None:
        """Enqueue all of it on `stream`, or on torch's current stream."""
        if stream is None:
            stream = torch._C._cuda_getCurrentRawStream(self.index)
        if self._launch(self._executable, stream)[0]:
            # Run it again, for the error, or because this thread is new.
            bind_thread(self.index)
            call("cuGraphLaunch", self._executable, stream)

    def release(self) -> None:
        """Destroy the graph, after the work on its way; it cannot be replayed again."""
        self.__del__()

    def __del__(self, suppress: Any = contextlib.suppress) -> None:
        # Names are passed in: at interpreter exit, names of modules are gone before objects are.
        executable, self._executable = getattr(self, "_executable", None), None
        if executable is not None:
            with suppress(Exception), tolerate_captures():
                call("cuGraphExecDestroy", executable)


@contextmanager
def waits_refused() -> Iterator[None]:
    """Make torch operations that wait for the GPU raise RuntimeError before they wait, in all threads.

    Checked before a recording: a failed recording leaves torch's allocator waiting for its end, and no memory returns.
    """
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # torch warns that it does not find all waits.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def record_graph(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any = None) -> Iterator[None]:
    """Capture the work of the block, on a stream that is otherwise idle; others may allocate and wait meanwhile."""
    with torch.cuda.stream(stream):
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()


class Recorder:
    """Recorder of CUDA graphs that are replayed in the order of recording, in one memory pool.

    Args:
        spared: Multiprocessors that recorded matrix products leave to a loader that reads rows of the host. None leaves
            as many as the features of this process take now.
        empties: Return all memory that torch has cached to the driver first, as a graph cannot use it. The more other
            work has left there, the longer this takes, and so does the next allocation.
    """

    def __init__(self, device: torch.device, spared: int | None = None, *, empties: bool = True) -> None:
        self._device, self._spared, self._empties = device, spared, empties
        # Torch's own capture stream belongs to the GPU that was current at its first use.
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], None]) -> Any:
        """Record `work` as a graph to be replayed with `replay()`; its results are not computed before."""
        graph = torch.cuda.CUDAGraph()
        if self._empties:
            # Operations of earlier passes that still live in a reference cycle order gradients after streams that are
            # not captured.
            gc.collect()
        torch.cuda.synchronize(self._device)
        if self._empties:
            torch.cuda.empty_cache()
        # Casts that a caller's autocast caches belong to the step before, and casts of a recording to the graph.
        torch.clear_autocast_cache()
        spared = count_spared(self._device.index) if self._spared is None else self._spared
        try:
            # The second makes the GPU the current one, and restores its stream, also after an error.
            with (
                products_leave(spared, self._device),
                torch.cuda.stream(torch.cuda.current_stream(self._device)),
                record_graph(graph, self._stream, self._pool),
            ):
                work()
        finally:
            torch.clear_autocast_cache()
        return graph


def find_wait(work: Callable[[], None], failures: type[Exception] = RuntimeError) -> str | None:
    """Run work once and return why it cannot be recorded: it waits for the GPU, or fails. Otherwise return None."""
    try:
        with waits_refused():
            work()
    except failures as error:
        return describe(error)
    return None
