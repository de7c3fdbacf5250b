"""`Communicator`: an ordered channel to other processes, apart from the collectives of the training program."""

from __future__ import annotations

import atexit
import json
import queue
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pyg_direct.errors import ArgumentError, DeviceError, IdError, RankError
from pyg_direct.runtime.comm.formation import Connections, Formation, check_interfaces, failures_told, name_ranks
from pyg_direct.runtime.comm.heartbeat import Pulse
from pyg_direct.runtime.comm.nccl_segments import NcclSegments

_MOST_WORDS = 1 << 12
# Least number of words in a row: the status of the process, and one more.
_LEAST_WIDTH = 2
# Seconds between two checks that the others are alive, while a process waits for an exchange.
_LOOK = 1.0
# Seconds that a process that failed waits for its threads.
_END = 5.0
# The headers that processes begin with when one of them failed are below this.
_FAILED = -1
_HOST = torch.device("cpu")


class Unawaited(NamedTuple):
    """Result of a task whose work on the GPU is not waited for: its caller orders it by an event."""

    value: Any


class Communicator:
    """Exchanges bytes with all processes of a group, in an order that is the same in all of them.

    It has its own process group and one thread that runs tasks one after the other. So batches made ahead never mix
    with the collectives of DDP, nor do two loaders mix with each other. The program must request them in one order on
    all ranks. If one process fails, the others get the reason before they wait for it.

    Processes meet on the host, by Gloo, even if bytes go by NCCL. An NCCL kernel that waits for a late process blocks
    every call that waits for the whole GPU. The first matrix product of a program is such a call. The other process may
    be late for this very reason.

    Args:
        group: Ranks of this group take part, and each of them makes its communicator; None for all. With NCCL all other
            processes must make one at the same time.
        backend: `nccl` or `gloo`, for the bytes. The default is NCCL for tensors on GPUs, otherwise Gloo, which moves
            them over the host. If all processes are on one host, Gloo listens on the loopback, unless
            `GLOO_SOCKET_IFNAME` is set.
        timeout: Seconds that an exchange waits for the slowest process, and that all processes have to join at first.
        silence: Seconds that it waits for a process without a heartbeat, over Gloo.
        captured: Whether `open_segments` offers exchanges that CUDA graphs capture, equal on all ranks.

    Partners are the other ranks, ascending, then this one, so that data for others is contiguous.

    Attributes:
        rank, size: This process in the group, and their number.
        width: Words of the rows that processes begin an exchange with, equal on all ranks.
        sent: Bytes sent to other processes so far, by kind of data.
    """

    captured = False
    _store: Any = None
    _segments: NcclSegments | None = None

    def __init__(self, group: Any = None, *, device: torch.device, backend: str | None = None,
                 timeout: float = 600, silence: float = 30, captured: bool = False) -> None:  # fmt: skip
        if not dist.is_available() or not dist.is_initialized():
            raise ArgumentError("a process group must be there before graphs are opened in parts; call "
                                "torch.distributed.init_process_group first")  # fmt: skip
        backend = ("nccl" if device.type == "cuda" else "gloo") if backend is None else backend
        # A weak reference: the communicator does not keep the group alive.
        self._find_world: Callable[[], Any] = weakref.ref(dist.group.WORLD)  # type: ignore[arg-type]
        ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
        if dist.get_rank() not in ranks:
            raise ArgumentError(f"group must have this process, rank {dist.get_rank()}, as a member, got ranks {ranks}")
        with failures_told(group):
            _check(device, backend, timeout, silence, captured)
            if len(ranks) > 1:
                check_interfaces()
        self.device, self._wire, self.captured = device, device if backend == "nccl" else _HOST, captured
        self._connections = Connections()
        self._ranks, self._silence, self._timeout = ranks, silence, timeout
        self._pulse: Pulse | None = None
        self.rank, self.size = ranks.index(dist.get_rank()), len(ranks)
        self._word_group: Any = None
        self._own_group: Any = None
        if self.size > 1:
            self._join(backend, timeout, captured)
        self._is_open = True
        self.width = _LEAST_WIDTH
        self.sent: Counter[str] = Counter()
        self._memory: dict[str, Tensor] = {}
        self._broken: str | None = None
        self._turns: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # Iterators and other steps that go on until they are cut, in the order in which they began.
        self._followed: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # A daemon thread, because Python waits for others at exit: a process that failed must end, so that the others
        # notice.
        self._worker = threading.Thread(target=self._work, name="pyg_direct_exchange", daemon=True)
        self._worker.start()
        atexit.register(self.close)

    def _join(self, backend: str, timeout: float, captured: bool) -> None:
        """Form the groups; if a process fails or dies meanwhile, the error names it."""
        formation = Formation(self._ranks, timeout, self._silence)
        try:
            self._word_group = self._own_group = formation.join(self._connections)
            if backend == "nccl":
                self._own_group = formation.watch(
                    partial(dist.new_group, self._ranks, timeout=timedelta(seconds=timeout), backend=backend)
                )
                self._store = formation.open_store("segments") if captured else None
        except BaseException:
            self._connections.give_up()
            formation.abandon()
            raise
        self._pulse = formation.pulse

    @property
    def is_open(self) -> bool:
        """Report whether it was neither closed nor lost its group together with the program's group."""
        return self._is_open and dist.is_initialized() and dist.group.WORLD is self._find_world()

    def submit(self, fn: Callable[..., Any], *args: Any) -> Future[Any]:
        """Submit a task for its turn; every process must submit the same tasks in the same order."""
        done: Future[Any] = Future()
        if not self._is_open:
            raise ArgumentError("the graph is closed, and so is its way to other processes")
        # Work on the caller's stream, such as writes of rows, must come first.
        waits = self._stream is not None and not torch.cuda.is_current_stream_capturing()
        event = torch.cuda.current_stream(self.device).record_event() if waits else None
        self._turns.put((done, event, fn, args))
        return done

    def follow(self, steps: Any) -> None:
        """Call `cut` of these steps when this communicator is closed, if another object still holds them."""
        self._followed[steps] = None

    def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run a task in its turn and wait for it; at once if its turn is now."""
        if threading.current_thread() is self._worker:
            return fn(*args)
        return self.submit(fn, *args).result()

    def _work(self) -> None:
        while (turn := self._turns.get()) is not None:
            self._run(*turn)

    def _run(self, done: Future[Any], event: Any, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            if self._stream is None:
                result = fn(*args)
            else:
                with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
                    if event is not None:
                        event.wait()
                    result = fn(*args)
                    if isinstance(result, Unawaited):
                        result = result.value
                    else:
                        self._stream.synchronize()
        except BaseException as error:
            # First wake the caller here: notifying the others may take a while.
            done.set_exception(error)
            if not isinstance(error, RankError):
                self._tell(f"{type(error).__name__}: {error}")
            return
        done.set_result(result)

    def open_segments(self) -> NcclSegments | None:
        """Return the exchange of segments inside captured graphs; None unless `captured`, or without other ranks.

        The first call is collective.
        """
        if self._segments is None and self._store is not None:
            self._segments = self._connect()
        return self._segments

    def _connect(self) -> NcclSegments:
        """Connect all ranks by NCCL, in a thread of its own: NCCL waits forever for a rank where it cannot start."""
        connected: Future[NcclSegments] = Future()

        def connect() -> None:
            try:
                # A thread has its own current device.
                with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
                    connected.set_result(NcclSegments.open(
                        self._store, self.rank, self.size, self.device, timeout=self._timeout,
                        find_reason=self._find_reason, hear=partial(self.agree, 0)))  # fmt: skip
            except BaseException as error:
                connected.set_exception(error)

        assert self._pulse is not None
        threading.Thread(target=connect, name="pyg_direct_connect", daemon=True).start()
        while not wait([connected], _LOOK).done:
            if (reason := self._find_reason()) is not None:
                if self._broken is None:
                    # A rank failed, which says why.
                    self.agree(0)
                raise RankError(reason)
        self._pulse.rest()
        try:
            return connected.result()
        except RuntimeError as error:
            if missing := self._pulse.call_roll():
                self._broken = self._accuse(missing, str(error))
                raise RankError(self._broken) from error
            raise DeviceError(
                f"NCCL must connect the GPUs of all ranks, and fails on rank {self._ranks[self.rank]}: {error}; "
                "NCCL_DEBUG=INFO shows more, and backend='gloo' exchanges without NCCL") from error  # fmt: skip

    def _find_reason(self) -> str | None:
        """Return the reason why a wait for the GPU is in vain, in the thread that watches it; None if it is not."""
        assert self._pulse is not None
        self._pulse.watch()
        if self._pulse.has_failed():
            return "another rank failed"
        silent = self._pulse.gone or self._pulse.find_silent()
        if not silent:
            return None
        self._broken = self._accuse(silent, f"no sign of life for {self._silence:g} seconds")
        return self._broken

    @property
    def is_awaited_by_graphs(self) -> bool:
        """True if exchanges are captured: the host waits for each graph, so that a task need not wait at its end."""
        return self._segments is not None

    def widen(self, width: int) -> None:
        """Widen rows to at least so many words; all processes do so between the same exchanges."""
        self.width = max(self.width, width)

    def agree(self, value: int) -> list[int]:
        """Return a number of each process, at least 0, by rank."""
        rows = self.make_rows(torch.device("cpu"))
        rows[: self.size, 1] = value
        found: list[int] = self.meet(rows)[1][:, 1].tolist()
        return [*found[: self.rank], found[-1], *found[self.rank : -1]]

    def exchange(self, parts: Sequence[Tensor], what: str) -> list[Tensor]:
        """Send part r to rank r, and return the parts that each rank has for this one; the own part is passed on
        unchanged.

        Args:
            parts: uint8 `[n]`, one for each rank.
            what: Kind of the bytes, for `sent`.
        """
        others = [part for rank, part in enumerate(parts) if rank != self.rank]
        rows = self.make_rows(torch.device("cpu"))
        rows[: self.size, 1] = torch.tensor([*(part.numel() for part in others), 0], device="cpu")
        sent, found = (table[:, 1].tolist() for table in self.meet(rows))
        received = self.swap(torch.cat(others or [parts[0][:0]]), sent, found, what).clone().split(found)
        return [*received[: self.rank], parts[self.rank], *received[self.rank : -1]]

    def make_rows(self, device: torch.device) -> Tensor:
        """Return zeros for `meet`."""
        return torch.zeros(2 * self.size - 1, self.width, dtype=torch.int64, device=device)

    def meet(self, rows: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Exchange a row of words with each partner; failures are reported before any other wait.

        Args:
            rows: int64 `[2 * size - 1, width]`, on the device or the CPU: a row for each partner, and room for the rows
                of the others. The first word of all rows is 0, or negative if this process cannot go on. The row for
                this process itself comes back.

        Returns:
            (these rows, the rows that the partners have for this process), on the host; one wait for the GPU.
        """
        if self._broken is not None:
            raise RankError(self._broken)
        ones = [1] * (self.size - 1)
        rows = rows.cpu()
        if ones:
            self._all_to_all(rows[: self.size - 1], ones, ones, rows[self.size :], in_words=True)
        table = rows.numpy()
        sent, found = table[: self.size], np.concatenate([table[self.size :], table[self.size - 1 : self.size]])
        if found[:, 0].min() < 0:
            self._hear(found[:, 0])
        return sent, found

    def _hear(self, status: np.ndarray) -> None:
        """Raise the reason that a failed partner gives."""
        sizes_back = np.maximum(0, _FAILED - status[:-1]).tolist()
        none = torch.empty(0, dtype=torch.uint8, device="cpu")
        texts = self._all_to_all(none, [0] * len(sizes_back), sizes_back, in_words=True)
        reason = bytes(texts.tolist()).decode(errors="replace") or "it was asked for ids that it does not hold"
        if status[-1] < 0:
            self._broken = f"this process, rank {self._ranks[self.rank]}, failed: {reason}"
            raise IdError("ids must be held by this part, got others")
        failed = next(partner for partner, word in enumerate(status) if word < 0)
        self._broken = f"rank {self._ranks[failed + (failed >= self.rank)]} failed: {reason}"
        raise RankError(self._broken)

    def swap(self, data: Tensor, sizes: Sequence[int], sizes_back: Sequence[int], what: str) -> Tensor:
        """Send bytes to partners that know their number, and receive theirs; waits for no GPU.

        Args:
            data: uint8, for partner after partner.
            sizes, sizes_back: Bytes for and from each partner; the last entry of both is for this process.
            what: Kind of the bytes, for `sent`. Received bytes are valid until the next exchange of the same kind.
        """
        if self.size == 1:
            return data
        own = sizes[-1]
        here, back = data.numel() - own, sum(sizes_back[:-1])
        out = self._take(what, back + own)
        received = self._all_to_all(data[:here], sizes[:-1], sizes_back[:-1], out[:back])
        if received.data_ptr() != out.data_ptr():
            out[:back] = received
        if own:
            out[back:] = data[here:]
        self.sent[what] += here
        return out

    def _take(self, name: str, num_bytes: int) -> Tensor:
        """Return memory that is reused by every exchange of this name."""
        memory = self._memory.get(name)
        if memory is None or memory.numel() < num_bytes:
            memory = torch.empty(num_bytes + num_bytes // 4, dtype=torch.uint8, device=self.device)
            self._memory[name] = memory
        return memory[:num_bytes]

    def _tell(self, reason: str) -> None:
        """Send the others the reason why this process failed, as they are about to meet."""
        if self._broken is not None or self.size == 1:
            # A single process has no partner that waits.
            return
        self._broken = f"this process, rank {self._ranks[self.rank]}, failed: {reason}"
        if self._store is not None and self._pulse is not None:
            # The others may wait for this process on their GPUs.
            self._pulse.tell_failed()
        text = torch.tensor(list(reason.encode()[:_MOST_WORDS]), dtype=torch.uint8, device="cpu")
        others = self.size - 1
        try:
            words = torch.zeros(others, self.width, dtype=torch.int64, device="cpu")
            words[:, 0] = _FAILED - text.numel()
            found = self._all_to_all(words, [1] * others, [1] * others, in_words=True)[:, 0].tolist()
            sizes_back = [max(0, _FAILED - word) for word in found]
            self._all_to_all(text.repeat(others), [text.numel()] * others, sizes_back, in_words=True)
        except RankError:
            # The user should see the original error of this process.
            return

    def _all_to_all(self, sent: Tensor, sizes: Sequence[int], sizes_back: Sequence[int], out: Tensor | None = None, *,
                    in_words: bool = False) -> Tensor:  # fmt: skip
        """Exchange rows with all others, on the host if `in_words`, into `out` if it is on the receiving device."""
        wire, group = (_HOST, self._word_group) if in_words else (self._wire, self._own_group)
        sent = sent.to(wire).contiguous()
        if out is None or out.device != wire:
            out = sent.new_empty((sum(sizes_back), *sent.shape[1:]))
        by_rank, back_by_rank = ([*given[: self.rank], 0, *given[self.rank :]] for given in (sizes, sizes_back))
        try:
            waits = self._pulse is not None and wire.type == "cpu"
            if waits:
                # This group is unknown to torch: to register it, all processes of the default group would have to call.
                self._wait(group.alltoall_base(out, sent, back_by_rank, by_rank, dist.AllToAllOptions()))
            else:
                dist.all_to_all_single(out, sent, back_by_rank, by_rank, group)
        except RankError as error:
            self._broken = str(error)
            self._connections.give_up()
            raise
        except RuntimeError as error:
            self._broken = self._call_roll(error)
            raise RankError(self._broken) from error
        return out

    def _wait(self, work: Any) -> None:
        """Wait for an exchange as long as the others are alive."""
        assert self._pulse is not None
        while not work.is_completed():
            try:
                work.wait(timedelta(seconds=_LOOK))
            except RuntimeError:
                if work.is_completed():
                    break
                self._pulse.watch()
                if silent := self._pulse.find_silent():
                    reason = f"no sign of life for {self._silence:g} seconds"
                    raise RankError(self._accuse(silent, reason)) from None
        self._pulse.rest()
        # Keeps received data in place, or raises the error.
        work.wait()

    def _call_roll(self, error: Exception) -> str:
        """Return which process is gone, as far as the store of the group shows."""
        # Not if this process itself is ending.
        missing = self._pulse.call_roll() if self._pulse is not None and self._is_open else []
        return self._accuse(missing, str(error)) if missing else f"an exchange with other ranks failed: {error}"

    def _accuse(self, missing: list[int], reason: str) -> str:
        """Send the others the missing ranks, lest they find this process gone first; return them in words."""
        assert self._pulse is not None
        gone = self._pulse.tell_gone(missing)
        if self.rank in gone:
            return f"rank {self._ranks[self.rank]}, this process, was silent for so long that the others gave it up"
        return f"{name_ranks(self._ranks, gone)} is gone: {reason}"

    def _stop_pulse(self) -> None:
        if self._pulse is not None:
            self._pulse.stop()

    def close(self) -> None:
        """Finish the submitted tasks, then end the thread and the group; all processes call it.

        At exit it is called automatically, unless the program failed: then the others should notice the failure.
        """
        if not self._is_open:
            return
        if not hasattr(sys, "last_type"):
            # While an iterator is held the others depend on this process: it takes part in their batches.
            for steps in list(self._followed):
                steps.cut()
        self._is_open = False
        atexit.unregister(self.close)
        self._turns.put(None)
        if hasattr(sys, "last_type"):
            # The thread must not return from an exchange while Python ends.
            if self._segments is not None:
                self._segments.close(failed=True)
            self._connections.give_up()
            self._worker.join(_END if self._wire.type == "cpu" else 0)
            self._stop_pulse()
            return
        self._worker.join()
        if self._segments is not None:
            self._segments.close(failed=self._broken is not None)
            self._segments = None
        self._memory.clear()
        self._stop_pulse()
        own, words = self._own_group, self._word_group
        self._own_group = self._word_group = None
        if own is not words and dist.is_initialized():
            dist.destroy_process_group(own)


def gather_json(communicator: Communicator, value: Any) -> list[Any]:
    """Gather a JSON value of each process in all processes, by rank. Collective, in the communicator's turn."""
    message = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    answers = communicator.exchange([message] * communicator.size, "words")
    return [json.loads(bytes(answer.tolist())) for answer in answers]


def _check(device: torch.device, backend: str, timeout: float, silence: float, captured: bool) -> None:
    if backend not in ("gloo", "nccl") or (backend == "nccl" and device.type != "cuda"):
        raise ArgumentError(f"backend must be gloo, or nccl with tensors on GPUs, got {backend!r} on {device}")
    if captured and backend != "nccl":
        raise ArgumentError(f"captured=True needs backend='nccl', with tensors on GPUs, got {backend!r} on {device}")
    for name, seconds in (("timeout", timeout), ("silence", silence)):
        if not (isinstance(seconds, (int, float)) and seconds > 0):
            raise ArgumentError(f"{name} must be above 0 seconds, got {seconds!r}")
