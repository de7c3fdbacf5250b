"""A sequence of our kernels captured once as a CUDA graph and replayed with one submission."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import torch

from pyg_direct.runtime.device import bind_thread
from pyg_direct.runtime.driver import call, load_driver, tolerate_captures


def fill_words(tensor: torch.Tensor, word: int, stream: int) -> None:
    """Enqueue: set every 32-bit word of a tensor (done at once for one on the CPU)."""
    if not tensor.is_cuda:
        tensor.view(torch.int32).fill_(word)
        return
    call("cuMemsetD32Async", tensor.data_ptr(), word, tensor.numel() * tensor.element_size() // 4, stream)


class CapturedGraph:
    """What `record(stream)` enqueues, as one replayable graph.

    Capture runs on a stream of its own in thread-local mode, so that it neither sees nor disturbs work, captures
    and allocations of other streams and threads. The tensors used must outlive the graph and keep their addresses.
    """

    def __init__(self, record: Callable[[int], None], index: int) -> None:
        driver = load_driver()
        self.index = index
        with torch.cuda.device(index):
            bind_thread(index)
            stream = call("cuStreamCreate", int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
            collects = gc.isenabled()
            # Tensors that the collector frees meanwhile would make torch ask for events, which ends a capture.
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
            # Once more, for the error, or because this thread is new.
            bind_thread(self.index)
            call("cuGraphLaunch", self._executable, stream)

    def __del__(self) -> None:
        executable = getattr(self, "_executable", None)
        if executable is not None:
            with contextlib.suppress(Exception), tolerate_captures():
                call("cuGraphExecDestroy", executable)
