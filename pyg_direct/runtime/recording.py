"""What torch enqueues in a block, captured as a CUDA graph of torch's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
