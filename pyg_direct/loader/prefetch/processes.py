"""Batches made by separate processes, on GPUs or cores that do not train: for models that use their whole GPU.

`WorkerSampler` serves users who request worker processes: workers sample on the CPU, and features are fetched here.
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import signal
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import get_temp_dir
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.utils.data import Dataset

from pyg_direct.errors import ArgumentError, ArgumentTypeError, DeviceError, LoaderWarning, PygDirectError, warn
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.loader.base_loader import EpochLoader
from pyg_direct.loader.batch_report import ReportedLoader
from pyg_direct.loader.batch_sampler import Seeds, Share, iterate_batches, open_positions
from pyg_direct.loader.collate.attributes import find_learned, has_learned
from pyg_direct.loader.collate.stale_rows import Marks, Values
from pyg_direct.object_text import one_line
from pyg_direct.ops.argument_checks import check_count
from pyg_direct.runtime.cuda.device import resolve_device
from pyg_direct.sampling.random_key import EpochKey
from pyg_direct.sampling.sampling_options import Recipe, Sample
from pyg_direct.sampling.uniform_plan import Plan, open_plan
from pyg_direct.typing import Device

# Seconds within which waiting processes notice the end of a process.
_SECONDS = 2.0
_BATCH, _END, _ERROR = range(3)


@dataclass(frozen=True)
class Lane(Share):
    """Share of one producer in the batches of its process: every `width`-th batch.

    Attributes:
        lane: Index of this producer, from 0.
    """

    lane: int = 0
    width: int = 1

    def count_steps(self, num_batches: int) -> int:
        """Count the batches of this producer."""
        return max(0, -(-(super().count_steps(num_batches) - self.lane) // self.width))

    def number_of(self, step: int) -> int:
        """Return the global number of the batch of a step."""
        return super().number_of(self.lane + step * self.width)


class Producers(ReportedLoader):
    """Batches of a loader, in its order, made by other processes.

    The loader is sent to each of them and does not work here. Batches come through channels of at most `ahead` batches
    each. Batches of CPU producers are in shared memory; batches of GPUs are handles of their memory, copied to `device`
    here. Another iteration requests the next epoch from the same processes. They end with this object, with this
    process, or by `close()`. If a producer is killed, an error names it within seconds. `record` and `report` have the
    times of waits and of the use of batches here.

    A sampler of the program is called here for a whole epoch, at its start. Rows that are written while an epoch runs
    may not be in its batches; a warning reports this. Edits before an epoch take effect in it. If an attribute was
    assigned, the processes are restarted, which takes seconds. Writes in place are detected there, also writes through
    NumPy (see "Edits" of `NeighborLoader`). Exceptions are copied tensors on a GPU, and stores of other packages.

    Args:
        loader: A loader of this package, also with `ranks`.
        devices: One producer for each: GPUs, or `"cpu"`.
        device: Device of the batches; None is the current GPU if there is one, otherwise the CPU.
        ahead: Batches that each producer prepares ahead.
        threads: Cores of each CPU producer; None divides all cores.

    Raises:
        ArgumentError, ArgumentTypeError, DeviceError: named argument, rule and value. Also if torch's allocator uses
            expandable segments, whose memory cannot be sent.
    """

    def __init__(self, loader: EpochLoader, devices: Sequence[Device] = ("cpu",), *, device: Device = None,
                 ahead: int = 2, threads: int | None = None) -> None:  # fmt: skip
        if not isinstance(loader, EpochLoader):
            raise ArgumentTypeError(f"loader must be one of pyg_direct's, got {type(loader).__name__}")
        check_count("ahead", ahead)
        if isinstance(devices, str) or not isinstance(devices, Sequence) or len(devices) == 0:
            raise ArgumentTypeError(f"devices must be a list of devices, at least one, got {devices!r}")
        if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
            raise ArgumentError(f"threads must be an integer of at least 1 or None, got {threads!r}")
        learned = find_learned(getattr(loader, "data", None))
        if learned is not None:
            _refuse_learned(learned)
        self.loader, self.ahead = loader, ahead
        self.devices = [resolve_device(d) for d in devices]
        self.device = resolve_device(device)
        if any(d.type == "cuda" for d in self.devices):
            # Settings of the program, here or at its import there, are visible to the producers.
            _refuse_expandable_segments(os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
                                        + os.environ.get("PYTORCH_ALLOC_CONF", ""))  # fmt: skip
        self._threads = threads or max(1, (os.cpu_count() or 1) // len(self.devices))
        self._processes: list[Any] = []
        self._orders: list[Any] = []
        self._channels: list[Any] = []
        # Batches of an abandoned epoch may still arrive: each carries the number of its epoch here.
        self._turn = 0
        self._has_told = False
        # Values that the processes received.
        self._sent: Values | None = None

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return len(self.loader)

    @one_line
    def __repr__(self) -> Iterator[str]:
        yield repr(self.loader)
        counts = Counter(map(str, self.devices))
        yield "made by " + ", ".join(f"{count} on {device}" for device, count in counts.items())
        yield f"ahead={self.ahead}"
        yield str(self.device)

    def _start(self) -> None:
        context = mp.get_context("spawn")
        # Children put their sockets there too, and are killed without a chance to remove their own folder.
        get_temp_dir()
        for device in self.devices:
            orders, channel = context.SimpleQueue(), context.Queue(self.ahead)
            process = context.Process(target=_produce, args=(self.loader, device, self._threads, orders, channel),
                                      daemon=True)  # fmt: skip
            process.start()
            # The producer is the only writer then: if it ends, a half-written message ends too.
            channel._writer.close()  # type: ignore[attr-defined]
            self._processes.append(process)
            self._orders.append(orders)
            self._channels.append(channel)
        self._stop = weakref.finalize(self, _end, self._processes, self._channels)
        self._sent = Values(getattr(self.loader, "data", None))

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the next epoch, or the remaining batches of a resumed one."""
        loader = self.loader
        if self._processes and self._sent is not None and not self._sent.are_those_of(getattr(loader, "data", None)):
            # Otherwise the processes would continue with the previous graph.
            self.close()
        if not self._processes:
            self._start()
        share = loader._share()
        # A sampler of the program is called here, once, with the generators of this process.
        positions = open_positions(loader)  # type: ignore[arg-type]
        epoch, first, key = loader._begin_epoch(share)
        given = None if positions is None else [torch.as_tensor(ids, device="cpu").reshape(-1) for ids in positions]
        self._turn += 1
        width = len(self.devices)
        for lane, orders in enumerate(self._orders):
            # The first step of this lane that is not before `first`.
            begin = -(-max(0, first - lane) // width)
            part = Lane(share.rank, share.count, share.uneven, lane, width, num_steps=share.num_steps)
            # As tensors, which are sent as handles: a producer may be busy with an abandoned epoch, and a pipe holds
            # little.
            own = None if given is None else _pack(given[lane::width])
            orders.put((self._turn, key, epoch, begin, part, own))
        record = self._begin_record()
        taken = self._take(epoch, first, None if loader.seed is not None else key.seed)
        return taken if record is None else record.hand_out(taken)

    def _list_places(self) -> tuple[list[str], dict[str, Any]]:
        return [f"producers: {', '.join(map(str, self.devices))}"], {}

    def _take(self, epoch: int, step: int, drawn: int | None) -> Iterator[Any]:
        turn, marks = self._turn, self._mark_rows()
        while True:
            if turn != self._turn:
                raise PygDirectError("an epoch of these producers was begun anew; its older iterator has no batches")
            kind, what = self._receive(step % len(self.devices), turn)
            if kind == _END:
                break
            if kind == _ERROR:
                self.close()
                what.reraise()
            step += 1
            batch = what if self.device.type == "cpu" else what.to(self.device)
            self.loader._standing = (epoch, step, drawn)
            if marks is not None and not marks.are_current():
                marks, self._has_told = None, True
                warn(
                    "rows of loader.data were written while an epoch runs, which batches of other processes do not "
                    "have, or not at once; iterate over the loader itself, with prefetch=0, or keep such rows apart "
                    "and index them by batch.n_id",
                    LoaderWarning,
                )
            yield batch
        self.loader._standing = (epoch + 1, 0, None)

    def _mark_rows(self) -> Marks | None:
        """Mark the current rows, to detect writes; None after a warning."""
        return None if self._has_told else Marks(getattr(self.loader, "data", None))

    def _receive(self, lane: int, turn: int) -> tuple[int, Any]:
        while True:
            self._expect_alive()
            try:
                message = self._channels[lane].get(timeout=_SECONDS)
                # Also messages of an abandoned epoch: unpickling releases their memory.
                sent, kind, what = ForkingPickler.loads(message)
            except queue.Empty:
                continue
            except (EOFError, OSError):
                # The producer writes the message and owns its memory: if it was killed meanwhile, this is the error to
                # report.
                self._processes[lane].join(_SECONDS)
                self._expect_alive()
                raise
            if sent == turn:
                return kind, what

    def _expect_alive(self) -> None:
        """Raise if any producer has ended."""
        for lane, process in enumerate(self._processes):
            if not process.is_alive():
                code = process.exitcode
                self.close()
                raise PygDirectError(f"producer {lane} on {self.devices[lane]} (process {process.pid}) ended with "
                                     f"exit code {code}")  # fmt: skip

    def close(self) -> None:
        """End the processes."""
        if self._processes:
            self._stop()
        self._processes, self._orders, self._channels = [], [], []

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch; see the loader."""
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the position in `state`.

        Args:
            state: Result of `state_dict`.

        Raises:
            ArgumentError: `state` is not from a loader, or from one with other batches.
        """
        self.loader.load_state_dict(state)


def _refuse_learned(what: str) -> None:
    raise ArgumentError("loader must be one whose rows carry no gradient, which does not come back from other "
                        f"processes, got {what} that requires one; iterate over the loader itself, or index it in the "
                        "model by batch.n_id")  # fmt: skip


def _refuse_expandable_segments(settings: str) -> None:
    if "expandable_segments:true" in settings.replace(" ", "").lower():
        raise DeviceError("devices: batches in GPU memory are sent to other processes only without "
                          "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")  # fmt: skip


def _end(processes: list[Any], channels: list[Any]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()
    for channel in channels:
        channel.cancel_join_thread()
        channel.close()


def _produce(loader: Any, device: torch.device, threads: int, orders: Any, channel: Any) -> None:
    """Run a producer until it is ended."""
    # Ctrl-C is for the training process, which then ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(threads)
    loader.device = device
    sampler = getattr(loader, "_sampler", None)
    if sampler is not None and hasattr(sampler, "device"):
        sampler.device = device
    while True:
        turn, key, epoch, begin, lane, given = orders.get()
        try:
            if device.type == "cuda":
                # Newer versions of torch report the program's settings.
                _refuse_expandable_segments(getattr(torch._C, "_accelerator_getAllocatorSettings", str)())
            loader._prepare()
            # Draws of the program's own functions repeat with the epoch too, as in torch's workers.
            _seed_worker(key.of_order() + lane.lane)
            positions = None if given is None else _unpack(*given)
            batches = iterate_batches(loader, key, begin, loader._input(), lane, positions)
            for batch in loader._iterate(epoch, begin, loader._work_here(key, batches)):
                if not orders.empty():
                    # The rest of this epoch is not needed.
                    break
                if has_learned(batch):
                    _refuse_learned("rows of a batch")
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                _send(channel, (turn, _BATCH, batch))
            else:
                _send(channel, (turn, _END, None))
        except Exception:
            from torch._utils import ExceptionWrapper

            error = ExceptionWrapper(where=f"in the producer on {device}, process {os.getpid()}")
            try:
                _send(channel, (turn, _ERROR, error))
            except Exception:
                # Its class is not found by its name; the traceback is text.
                error.exc_type = PygDirectError
                _send(channel, (turn, _ERROR, error))


def _pack(batches: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack (positions of all batches, number in each)."""
    none = torch.empty(0, dtype=torch.int64, device="cpu")
    counts = torch.tensor([len(ids) for ids in batches], dtype=torch.int64, device="cpu")
    return torch.cat([none, *(ids.long() for ids in batches)]), counts


def _unpack(positions: torch.Tensor, counts: torch.Tensor) -> Iterator[torch.Tensor]:
    # Copies: as `input_id` of batches they go to another process.
    return (ids.clone() for ids in positions.split(counts.tolist()))


def _seed_worker(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


def _send(channel: Any, message: Any) -> None:
    """Put a message into a channel as soon as it has room, unless the parent process has ended.

    Pickling happens here, so that errors are raised: a queue's thread would drop the message, and its reader would wait
    forever.
    """
    pickled, parent = bytes(ForkingPickler.dumps(message)), parent_process()
    while True:
        with contextlib.suppress(queue.Full):
            channel.put(pickled, timeout=_SECONDS)
            return
        if parent is not None and not parent.is_alive():
            os._exit(1)


class WorkItem(list[int]):
    """Positions of a batch, with its number; a list, as DataLoader requires."""

    def __init__(self, positions: Tensor, number: int) -> None:
        super().__init__(positions.tolist())
        self.number = number

    def __reduce__(self) -> Any:
        return WorkItem, (torch.tensor(list(self), dtype=torch.int64, device="cpu"), self.number)


class Positions(Dataset[Any]):
    """Dataset of the positions 0 .. count-1 of the input nodes; a batch of them is fetched whole."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, position: int) -> int:
        return position

    def __getitems__(self, positions: list[int]) -> list[int]:
        """Return the positions of a batch, in DataLoader's protocol."""
        return positions


class WorkerSampler:
    """`collate_fn` of worker processes: samples a batch on the CPU, equal to any device's batch."""

    def __init__(self, csr_topo: CSRTopo, recipe: Recipe, key: EpochKey, input_nodes: Tensor) -> None:
        self.csr_topo, self.recipe, self.key, self.input_nodes = csr_topo, recipe, key, input_nodes
        self._plan: Plan | None = None

    def __call__(self, item: Any) -> tuple[WorkItem, Sample]:
        """Return the sample of a `WorkItem`."""
        if self._plan is None:
            self._plan = open_plan(self.csr_topo.place("cpu", "cpu"), self.recipe)
        seeds = self.input_nodes[torch.tensor(list(item), dtype=torch.int64, device="cpu")]
        return item, self._plan.sample(seeds, self.key.of_batch(item.number))  # type: ignore[return-value]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plan": None}


def number_items(batches: Iterator[tuple[int, Seeds]]) -> Iterator[WorkItem]:
    """Number the work items of an epoch."""
    for number, seeds in batches:
        yield WorkItem(seeds.positions, number)
