"""Tensors of host memory that a thread copies to a GPU before they are asked for, in order."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from pyg_direct.dynamic.copies import Coming, CopyStream
from pyg_direct.loader.background import FORK_GATE
from pyg_direct.runtime.host import count_cores

# Bytes that are worth a thread: it takes 0.1 ms to begin, in which a megabyte of pageable memory is copied.
_WORTH = 2**22


class Arrivals:
    """Copies on a device, each begun by a thread before it is asked for, or made when it is.

    Programs give pageable memory, of which the driver copies 7 GB/s while the thread that asks waits. An exception is
    raised where its tensor is asked for. A process with a single core gets no thread.

    Args:
        device: Where tensors go.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._copies = device, CopyStream(device)
        # By what they are copies of, which is kept alive so that nothing else has its id.
        self._coming: dict[int, tuple[Tensor, Future[Coming[Tensor]]]] = {}

    def __reduce__(self) -> Any:
        # Copies begin with nothing.
        return Arrivals, (self._device,)

    def begin(self, given: Iterable[Tensor]) -> None:
        """Let the thread copy tensors of host memory, in order, if they are many bytes together."""
        fresh = {id(t): t for t in given if t.device.type == "cpu" and id(t) not in self._coming}
        num_bytes = sum(t.numel() * t.element_size() for t in fresh.values())
        if not self._copies.is_apart or num_bytes < _WORTH or count_cores() < 2:
            return
        pool = ThreadPoolExecutor(1, "pyg_direct-copies")
        self._coming |= {key: (tensor, pool.submit(self._copy, tensor)) for key, tensor in fresh.items()}
        pool.shutdown(wait=False)

    def _copy(self, given: Tensor) -> Coming[Tensor]:
        with FORK_GATE:
            return self._copies.begin(lambda: given.to(self._device))

    def take(self, given: Tensor) -> Tensor:
        """The copy of a tensor, once; the tensor itself where it is on the device."""
        _, future = self._coming.pop(id(given), (given, None))
        return given.to(self._device) if future is None else future.result().take(self._device)
