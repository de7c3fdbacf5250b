"""What torch enqueues on a GPU recorded as CUDA graphs, and what must be asked and set for that."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pyg_direct.runtime.share import count_spared, products_leave
from pyg_direct.runtime.waits import waits_refused


@contextmanager
def record_graph(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Iterator[None]:
    """Capture what the block enqueues, on a stream that has nothing else to do.

    `torch.cuda.graph` gives all memory that torch has cached back to the driver before, on the GPU and of the host: the
    more other work has left there the longer that takes, and then the longer until it is there again. Who runs out of
    memory here may call `torch.cuda.empty_cache` and capture anew. Other threads may allocate and wait meanwhile.
    """
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()


class Recorder:
    """Records CUDA graphs that are replayed in the order in which they were recorded, in one piece of memory.

    Args:
        device: The GPU.
        spared: Multiprocessors that recorded matrix products leave to a loader that reads rows of the host; None leaves
            what the features of this process take now.
    """

    def __init__(self, device: torch.device, spared: int | None = None) -> None:
        self._device, self._spared = device, spared
        # Torch's own stream for it is one of the GPU that was current when it was first asked for.
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], None]) -> Any:
        """A graph of what `work` enqueues, to be asked for `replay()`; nothing of it is computed before.

        Raises:
            RuntimeError: the work waits for the GPU, see `find_wait`.
        """
        graph = torch.cuda.CUDAGraph()
        gc.collect()
        torch.cuda.synchronize(self._device)
        # Casts that a caller's autocast keeps belong to the step before, and those of a recording to the graph.
        torch.clear_autocast_cache()
        spared = count_spared(self._device.index) if self._spared is None else self._spared
        try:
            # The second makes the GPU the current one, and its stream what it was, also after an error.
            with (
                products_leave(spared, self._device),
                torch.cuda.stream(torch.cuda.current_stream(self._device)),
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                work()
        finally:
            torch.clear_autocast_cache()
        return graph


def find_wait(work: Callable[[], None], failures: type[Exception] = RuntimeError) -> str | None:
    """Why work cannot be recorded, which is done for once: it waits for the GPU, or fails. None where it does not.

    Args:
        failures: Errors that are an answer.
    """
    try:
        with waits_refused():
            work()
    except failures as error:
        return (str(error) or type(error).__name__).splitlines()[0]
    return None
