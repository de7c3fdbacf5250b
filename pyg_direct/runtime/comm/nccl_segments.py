"""`NcclSegments`: exchange of segments of equal length by NCCL, which CUDA graphs capture.

Plans know only `Transport`, so that tests run several ranks of a plan on one device.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from pyg_direct.errors import RankError
from pyg_direct.runtime.cuda.device import tolerate_captures
from pyg_direct.runtime.cuda.launch import on_raw_stream

# Blocks that NCCL may take: 32 move the segments of a batch in 0.70 ms, 16 in 1.09, 8 in 2.08 (four H200).
_BLOCKS = 32
# Seconds between two looks at a wait for the GPU.
_LOOK = 1.0
# Seconds that an aborted group is waited for.
_END = 5.0


class Holder(Protocol):
    """Owner of captured graphs with exchanges."""

    def release(self) -> bool:
        """Release the graphs; False if a batch is on its way in them."""


class Exchange(Protocol):
    """Exchange of segments, which `Transport` has; see there."""

    def exchange(self, to_send: Tensor, received: Tensor, stream: int) -> None:
        """As of `Transport`."""

    def exchange_with_others(self, to_send: Tensor, received: Tensor, stream: int) -> None:
        """As of `Transport`."""


class Transport(Protocol):
    """Exchange of segments between all ranks, which call it in one order.

    Attributes:
        is_captured: True if exchanges can be captured in a graph.
    """

    is_captured: bool

    @property
    def beside(self) -> Exchange | None:
        """Exchange at the same time on another stream, by a group of its own; None without one."""

    def exchange(self, to_send: Tensor, received: Tensor, stream: int) -> None:
        """Enqueue: segment p of `to_send` goes to rank p, whose segment stands at place p of `received`.

        Args:
            to_send, received: `[P * length]`, contiguous.
        """

    def exchange_with_others(self, to_send: Tensor, received: Tensor, stream: int) -> None:
        """As `exchange`, with segments of the other ranks alone, in the order of their numbers.

        Args:
            to_send, received: `[(P - 1) * length]`, contiguous.
        """

    def follow(self, event: torch.cuda.Event) -> None:
        """End exchanges before an event if a rank is gone, also while the host waits for other work behind them."""

    def wait(self, event: torch.cuda.Event) -> None:
        """Wait for an event behind exchanges as long as all ranks go on."""

    def hold(self, holder: Holder) -> None:
        """Release the graphs of a holder before the transport ends."""


class _Lane:
    """Exchange by a group of NCCL, whose exchanges follow each other.

    Attributes:
        ended_by: The reason why the group was aborted, if it was.
    """

    def __init__(self, group: Any, size: int, device: torch.device) -> None:
        self._group, self._size, self._device = group, size, device
        self.ended_by: str | None = None
        self._options = dist.AllToAllOptions()
        self._options.asyncOp = False

    @classmethod
    def open(cls, store: Any, rank: int, size: int, device: torch.device, timeout: float) -> _Lane:
        """Open a group of all ranks and connect them; collective."""
        lane = cls(_open_group(store, rank, size, timeout), size, device)
        lane.connect()
        return lane

    def connect(self) -> None:
        """Connect all ranks by a first exchange, which a capture must not wait for."""
        words = torch.zeros(2, self._size, dtype=torch.int64, device=self._device)
        self._swap(words[0], words[1])
        torch.cuda.current_stream(self._device).synchronize()

    def _swap(self, to_send: Tensor, received: Tensor, sizes: Sequence[int] = ()) -> None:
        if self.ended_by is not None:
            # An aborted group would wait for the other ranks to connect again.
            raise RankError(self.ended_by)
        work = self._group.alltoall_base(received, to_send, list(sizes), list(sizes), self._options)
        if work is not None:
            work.wait()

    def exchange(self, to_send: Tensor, received: Tensor, stream: int) -> None:
        """Exchange segments; see `Transport`."""
        with on_raw_stream(stream, self._device):
            self._swap(to_send, received)

    def exchange_with_others(self, to_send: Tensor, received: Tensor, stream: int) -> None:
        """Exchange segments of the other ranks; see `Transport`."""
        if self._size == 1:
            return
        sizes = [to_send.numel() // (self._size - 1)] * self._size
        sizes[self._group.rank()] = 0
        with on_raw_stream(stream, self._device):
            self._swap(to_send, received, sizes)


def _open_group(store: Any, rank: int, size: int, timeout: float) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout)
    if "NCCL_MAX_CTAS" not in os.environ:
        options.config.max_ctas = _BLOCKS
    return dist.ProcessGroupNCCL(store, rank, size, options)


class NcclSegments(_Lane):
    """Exchange of segments between the GPUs of all ranks.

    The group of NCCL is its own, and unknown to torch: `destroy_process_group` would wait forever for graphs that hold
    its work. `close` releases these graphs first. While a graph is on its way, a thread checks that the other ranks are
    alive and have not failed. Otherwise it aborts the group, so that the graph ends.

    An exchange on a GPU blocks calls that wait for the whole GPU. So ranks should meet on the host before each batch.

    Attributes:
        beside: Exchange by a second group, which may run at the same time; None without other ranks.

    Args:
        group: The group of NCCL, whose ranks are connected.
        timeout: Seconds that a wait for a graph may take.
        find_reason: Returns the reason why ranks cannot go on, seconds after the wait began; None if they can.
        hear: Called after the group was aborted for this reason, to raise the error of a rank that failed.
    """

    is_captured = True

    def __init__(self, group: Any, size: int, device: torch.device, *, timeout: float,
                 find_reason: Callable[[], str | None] = lambda: None, hear: Callable[[], object] = lambda: None
                 ) -> None:  # fmt: skip
        super().__init__(group, size, device)
        self._timeout, self._find_reason, self._hear = timeout, find_reason, hear
        self.beside: _Lane | None = None
        self._holders: weakref.WeakSet[Any] = weakref.WeakSet()
        # Events behind exchanges, with the times when these were enqueued, by id.
        self._followed: dict[int, tuple[torch.cuda.Event, float]] = {}
        self._lock = threading.Lock()
        # Begin of the wait for a graph, if there is one.
        self._since: float | None = None
        self._is_told = False
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if size > 1:
            self._thread = threading.Thread(target=self._watch, name="pyg_direct_segments", daemon=True)
            self._thread.start()

    @classmethod
    def open(cls, store: Any, rank: int, size: int, device: torch.device, timeout: float, **calls: Any
             ) -> NcclSegments:  # fmt: skip
        """Open the group of all ranks and connect them; collective.

        Args:
            store: Store by which the ranks find each other.
        """
        segments = cls(_open_group(store, rank, size, timeout), size, device, timeout=timeout, **calls)
        segments.connect()
        if size > 1:
            segments.beside = _Lane.open(PrefixStore("beside", store), rank, size, device, timeout)
        return segments

    def hold(self, holder: Holder) -> None:
        """Release the graphs of a holder before the group ends."""
        self._holders.add(holder)

    def follow(self, event: torch.cuda.Event) -> None:
        """End exchanges before an event if a rank is gone, also while the host waits for other work behind them."""
        if self._thread is not None:
            with self._lock:
                self._followed[id(event)] = event, time.monotonic()

    def _find_oldest(self) -> float:
        """Return the time when the oldest exchange was enqueued that is not over, or now."""
        oldest = time.monotonic()
        if not self._followed:
            return oldest
        with self._lock, tolerate_captures():
            for key, (event, begin) in list(self._followed.items()):
                with contextlib.suppress(RuntimeError):
                    if not event.query():
                        oldest = min(oldest, begin)
                        continue
                # It is over, or an error ended it, which the next call of the program meets.
                del self._followed[key]
        return oldest

    def wait(self, event: torch.cuda.Event) -> None:
        """Wait for an event behind exchanges as long as all ranks go on."""
        self._since = time.monotonic()
        try:
            event.synchronize()
        finally:
            self._since = None
        self._raise_end()

    def _raise_end(self) -> None:
        if self.ended_by is not None:
            if self._is_told:
                self._hear()
            raise RankError(self.ended_by)

    def _swap(self, to_send: Tensor, received: Tensor, sizes: Sequence[int] = ()) -> None:
        self._raise_end()
        super()._swap(to_send, received, sizes)

    def _watch(self) -> None:
        if self._device.type == "cuda":
            # A thread has its own current device, whose context a query would make.
            torch.cuda.set_device(self._device)
        while not self._ended.wait(_LOOK):
            since = self._since
            waited = 0.0 if since is None else time.monotonic() - since
            if max(waited, time.monotonic() - self._find_oldest()) < _LOOK:
                continue
            reason = self._find_reason()
            self._is_told = reason is not None
            if reason is None and waited > self._timeout:
                reason = f"an exchange on the GPU took more than {self._timeout:g} seconds"
            if reason is not None:
                # Ends the kernels that wait, then waits for their graphs, which `wait` lets go.
                self._abort(reason)
                return

    def _abort(self, reason: str) -> None:
        """End the kernels that wait, and refuse all exchanges from now on.

        A group waits for its graphs after that. These may go only when no kernel of the other group waits.
        """
        self.ended_by = reason
        other = None
        if self.beside is not None:
            self.beside.ended_by = reason
            other = threading.Thread(target=self.beside._group.abort, daemon=True)
            other.start()
        self._group.abort()
        if other is not None:
            other.join()

    def close(self, *, failed: bool = False) -> None:
        """Release all graphs, then end the group.

        Args:
            failed: Whether other ranks may be gone, so that kernels that wait for them must be aborted first.
        """
        self._ended.set()
        watching = self._thread if self._thread is not threading.current_thread() else None
        if watching is not None and self.ended_by is None:
            watching.join(_END)
        is_over = self.ended_by is not None
        # An abort ends after the graphs are released. A thread still in it would end the program when Python ends.
        ending = [watching] if watching is not None else []
        if failed and not is_over:
            ending.append(threading.Thread(target=self._abort, args=("this rank failed",), daemon=True))
            ending[-1].start()
            time.sleep(_LOOK / 10)
        until = time.monotonic() + _END
        for holder in list(self._holders):
            # A thread may still wait for the batch whose exchanges were aborted.
            while not holder.release() and time.monotonic() < until:
                time.sleep(_LOOK / 10)
        for thread in ending:
            thread.join(_END)
        if not failed and not is_over:
            for lane in (self, self.beside):
                if lane is not None:
                    lane._group.shutdown()
