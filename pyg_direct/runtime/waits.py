"""Work that must not wait for the GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def waits_refused() -> Iterator[None]:
    """Operations of torch that wait for the GPU raise RuntimeError before they do, in all threads.

    Asked before a recording: one that fails leaves torch's allocator waiting for its end, and no memory returns.
    """
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # That not all waits are found.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
