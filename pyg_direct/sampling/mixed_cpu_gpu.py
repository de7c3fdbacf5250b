"""A GPU and CPU cores sample the batches of one job together: `SampleJob` and `MixedGraphSageSampler`, after Quiver."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from pyg_direct.compiler.jit import set_cpu_threads
from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.object_text import one_line, show_count
from pyg_direct.runtime.cuda.device import resolve_device
from pyg_direct.runtime.host.threads import Pool
from pyg_direct.sampling.graphsage_sampler import Adj, GraphSageSampler
from pyg_direct.sampling.random_key import EpochKey, check_seed, draw_seed
from pyg_direct.typing import Device

# Device that samples beside the cores; None for no device.
_MODES = {"UVA_CPU_MIXED": "UVA", "GPU_CPU_MIXED": "GPU", "UVA_ONLY": "UVA", "GPU_ONLY": "GPU", "CPU_ONLY": None}
# Weight of the newest time in a running mean.
_NEWEST = 0.2
# Of the seconds that a core needs, how many it is given.
_IN_TIME = 1.25
# A number of cores is judged by so many batches at least, over as many times as long as a core takes for one. With more
# cores, batches may take this share of the seconds before. As loops pause now and then, a batch counts for at most so
# many times as long as one of the GPU.
_JUDGED_BATCHES, _JUDGED_TIMES, _FASTER, _MOST_TIMES = 16, 4, 0.98, 3

Result = tuple[Tensor, int, list[Adj]]


class SampleJob(ABC):
    """The seeds of the batches of an epoch, for `MixedGraphSageSampler`.

    Example:
        >>> class Job(SampleJob):
        ...     __len__ = lambda self: 2
        ...     __getitem__ = lambda self, index: torch.tensor([index])
        >>> job = Job()
        >>> len(job), job[1].tolist()
        (2, [1])
    """

    @abstractmethod
    def __getitem__(self, index: int) -> Tensor | Sequence[int]:
        """Seeds of batch `index`, int64 `[B]`."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of batches."""

    def shuffle(self) -> None:  # noqa: B027 (a job may keep its order)
        """Called before an epoch."""


class MixedGraphSageSampler:
    """Samples of a job in its order; a batch of the n-th epoch is the same, whichever device samples it.

    While the caller's thread samples on the GPU, each of `num_workers` threads samples another batch with one core. A
    core begins a batch that will be due about when the core is done. This is judged by the times of batches so far, in
    earlier epochs too. If that is after the epoch, the core begins none. If a core has not finished a batch when it is
    due, the GPU samples the batch instead. The number of cores is tried: none, one, two, four and so on, while batches
    come faster. Iterating yields `(n_id, batch_size, adjs)` as `GraphSageSampler.sample` returns them, on `device`. An
    exception in a thread or of the job is raised when its batch is due.

    Args:
        sample_job: The seeds.
        num_workers: Cores that sample beside the GPU, at most.
        csr_topo, sizes: See `GraphSageSampler`.
        seed: Seed of all draws; with None each epoch draws one number from torch's generator, and follows from it.
        device: Device of the results, and the GPU that samples; None is the current GPU, or the CPU without one.
        mode: `UVA_CPU_MIXED`, `GPU_CPU_MIXED`, `UVA_ONLY`, `GPU_ONLY` or `CPU_ONLY`. On a machine without a GPU the
            mixed modes are `CPU_ONLY`.

    Raises:
        ArgumentError, ArgumentTypeError, DeviceError: named argument, rule and value.

    Example:
        >>> class Job(SampleJob):
        ...     __len__ = lambda self: 2
        ...     __getitem__ = lambda self, index: torch.tensor([index])
        >>> topo = CSRTopo(torch.tensor([[1, 2, 3], [0, 0, 1]]))
        >>> sampler = MixedGraphSageSampler(Job(), 1, topo, sizes=[-1], mode="CPU_ONLY")
        >>> [n_id.tolist() for n_id, batch_size, adjs in sampler]
        [[0, 1, 2], [1, 3]]
    """

    def __init__(self, sample_job: SampleJob, num_workers: int, csr_topo: CSRTopo, sizes: Sequence[int],
                 device: Device = None, mode: str = "UVA_CPU_MIXED", *, seed: int | None = None) -> None:  # fmt: skip
        if not hasattr(sample_job, "__getitem__") or not hasattr(sample_job, "__len__"):
            raise ArgumentTypeError(f"sample_job must be a SampleJob, got {type(sample_job).__name__}")
        if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 0:
            raise ArgumentError(f"num_workers must be an integer of at least 0, got {num_workers!r}")
        if mode not in _MODES:
            raise ArgumentError(f"mode must be one of {', '.join(_MODES)}, got {mode!r}")
        if mode.endswith("MIXED") and device is None and not torch.cuda.is_available():
            mode = "CPU_ONLY"
        if mode == "CPU_ONLY" and num_workers == 0:
            raise ArgumentError("num_workers must be at least 1 where only the CPU samples, got 0")
        if mode == "CPU_ONLY" and device is not None and resolve_device(device).type != "cpu":
            raise ArgumentError(f"device must be 'cpu' or None where only the CPU samples, got {device!r}")
        if mode != "CPU_ONLY" and device is not None and resolve_device(device).type == "cpu":
            raise ArgumentError(f"mode={mode!r} needs a GPU, got device={str(device)!r}: give mode='CPU_ONLY'")
        self.job, self.mode = sample_job, mode
        self.num_workers = 0 if mode.endswith("ONLY") and mode != "CPU_ONLY" else num_workers
        self.seed, self._epoch = check_seed(seed), 0
        beside = _MODES[mode]
        self._gpu = None if beside is None else GraphSageSampler(csr_topo, sizes, device, beside, seed=self.seed)
        self.device = torch.device("cpu") if self._gpu is None else self._gpu.device
        self._on_cores = [GraphSageSampler(csr_topo, sizes, mode="CPU", seed=self.seed)
                          for _ in range(self.num_workers)]  # fmt: skip
        self._paces = _Paces(self.num_workers)
        # Of the latest epoch: batches that the GPU and the cores sampled.
        self.num_on_gpu = self.num_on_cores = 0

    @one_line
    def __repr__(self) -> Iterator[str]:
        yield show_count(len(self.job), "batch", "batches")
        yield f"mode={self.mode!r}"
        yield show_count(self.num_workers, "core")
        yield str(self.device)

    def __len__(self) -> int:
        """Number of batches."""
        return len(self.job)

    def __iter__(self) -> Iterator[Result]:
        """Return the samples of the next epoch."""
        self.job.shuffle()
        epoch, self._epoch = self._epoch, self._epoch + 1
        return self._iterate(EpochKey(draw_seed(), 0) if self.seed is None else EpochKey(self.seed, epoch))

    def _iterate(self, key: EpochKey) -> Iterator[Result]:
        count, running = len(self.job), _Running(self._on_cores, self._paces)
        self.num_on_gpu = self.num_on_cores = 0
        begin = time.perf_counter()
        try:
            for position in range(count):
                while running.may_start(self._gpu is not None):
                    wanted = running.choose(position, self._gpu is not None)
                    if wanted >= count:
                        break
                    running.start(wanted, self.job, key.of_batch(wanted))
                seeds, made = running.take(position)
                if made is not None and (self._gpu is None or made.done()):
                    result = self._bring(made.result())
                    self.num_on_cores += 1
                else:
                    assert self._gpu is not None
                    seeds = self.job[position] if made is None else seeds
                    result = self._gpu.sample(seeds, key=key.of_batch(position))
                    self.num_on_gpu += 1
                    made = None
                yield result
                now = time.perf_counter()
                # From batch to batch, so that the work of the caller on one counts.
                self._paces.note(now - begin, made is None)
                begin = now
        finally:
            running.close()

    def _bring(self, result: Result) -> Result:
        n_id, batch_size, adjs = result
        if self.device.type == "cpu":
            return result
        return n_id.to(self.device), batch_size, [adj.to(self.device) for adj in adjs]


class _Paces:
    """Seconds that batches take, as running means of all epochs; 0 is not known yet.

    Attributes:
        between: From one that the GPU samples to the next.
        core: Of a core for one; the first compiles, and does not count.
        num_cores: How many may sample beside a GPU now.
    """

    def __init__(self, most_cores: int) -> None:
        self.between = self.core = 0.0
        self.num_cores, self._most_cores = 0, most_cores
        self._is_warm, self._is_settled = False, most_cores == 0
        self._num_first = _JUDGED_BATCHES
        # Of batches since the number of cores was chosen; and the seconds of one with the best number so far.
        self._count, self._seconds = 0, 0.0
        self._best = (0, 0.0)

    def note_core(self, seconds: float) -> None:
        """Note the seconds that a core took for a batch."""
        if self._is_warm:
            self.core = _mean(self.core, seconds)
        self._is_warm = True

    def note(self, seconds: float, is_of_gpu: bool) -> None:
        """Note the seconds between two batches that were done with, and the device of the second."""
        if self._num_first > 0:
            # These compile, here and in the caller's loop.
            self._num_first -= 1
            return
        if self.between > 0:
            seconds = min(seconds, _MOST_TIMES * self.between)
        if is_of_gpu:
            self.between = _mean(self.between, seconds)
        if self._is_settled or (self.num_cores > 0 and self.core == 0):
            return
        self._count, self._seconds = self._count + 1, self._seconds + seconds
        if self._count >= _JUDGED_BATCHES and self._seconds >= _JUDGED_TIMES * self.core:
            self._judge(self._seconds / self._count)
            self._count, self._seconds = 0, 0.0

    def _judge(self, pace: float) -> None:
        if self.num_cores > 0 and pace > _FASTER * self._best[1]:
            self.num_cores, self._is_settled = self._best[0], True
            return
        self._best = self.num_cores, pace
        self._is_settled = self.num_cores == self._most_cores
        self.num_cores = min(self._most_cores, max(1, 2 * self.num_cores))


def _mean(so_far: float, newest: float) -> float:
    """Return the next running mean."""
    return newest if so_far == 0 else (1 - _NEWEST) * so_far + _NEWEST * newest


class _Running:
    """Batches that the cores sample now."""

    def __init__(self, samplers: Sequence[GraphSageSampler], paces: _Paces) -> None:
        self._idle, self._num_cores, self._paces = list(samplers), len(samplers), paces
        self._pool = Pool(len(samplers), "pyg_direct") if samplers else None
        self._last = -1
        self._made: dict[int, tuple[Any, Future[Result]]] = {}

    def may_start(self, beside_gpu: bool) -> bool:
        """Report whether an idle core may sample."""
        allowed = self._paces.num_cores if beside_gpu else self._num_cores
        return bool(self._idle) and self._num_cores - len(self._idle) < allowed

    def choose(self, position: int, beside_gpu: bool) -> int:
        """Choose the batch that a core begins when batch `position` is due."""
        lead = 0
        if beside_gpu:
            core, between = self._paces.core, self._paces.between
            lead = 1 + (math.ceil(_IN_TIME * core / between) if between > 0 else 0)
        return max(self._last + 1, position + lead)

    def start(self, index: int, job: SampleJob, key: int) -> None:
        """Let an idle core sample a batch. The job is asked in the caller's thread; its error waits for its turn."""
        assert self._pool is not None
        self._last = index
        try:
            seeds = job[index]
        except Exception as error:
            failed: Future[Result] = Future()
            failed.set_exception(error)
            self._made[index] = None, failed
            return
        sampler = self._idle.pop()
        self._made[index] = seeds, self._pool.submit(self._sample, sampler, seeds, key)

    def take(self, index: int) -> tuple[Any, Future[Result] | None]:
        """Take the seeds of a batch that a core was given, and its result; None if no core was."""
        return self._made.pop(index, (None, None))

    def _sample(self, sampler: GraphSageSampler, seeds: Any, key: int) -> Result:
        # Numba's number of threads belongs to the thread that set it: the caller's, if no other can start.
        before = set_cpu_threads(1)
        try:
            begin = time.perf_counter()
            result = sampler.sample(seeds, key=key)
            self._paces.note_core(time.perf_counter() - begin)
            return result
        finally:
            set_cpu_threads(before)
            self._idle.append(sampler)

    def close(self) -> None:
        """Wait for the cores and forget their results."""
        if self._pool is not None:
            self._pool.close()
        self._made.clear()
