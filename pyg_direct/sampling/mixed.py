"""A GPU and CPU cores sample the batches of one job together: `SampleJob` and `MixedGraphSageSampler`, after Quiver."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.graph.topology import CSRTopo
from pyg_direct.kernels.jit import set_cpu_threads
from pyg_direct.sampling.graphsage import Adj, GraphSageSampler
from pyg_direct.sampling.key import batch_key, resolve_seed
from pyg_direct.typing import Device

# What samples beside the cores; None for nothing.
_MODES = {"UVA_CPU_MIXED": "UVA", "GPU_CPU_MIXED": "GPU", "UVA_ONLY": "UVA", "GPU_ONLY": "GPU", "CPU_ONLY": None}
# Weight of the newest time in a running mean.
_NEWEST = 0.2

Result = tuple[Tensor, int, list[Adj]]


class SampleJob(ABC):
    """The seeds of the batches of an epoch, for `MixedGraphSageSampler`."""

    @abstractmethod
    def __getitem__(self, index: int) -> Tensor | Sequence[int]:
        """Seeds of batch `index`, int64 `[B]`."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of batches."""

    def shuffle(self) -> None:  # noqa: B027 (a job may keep its order)
        """Called before an epoch."""


class MixedGraphSageSampler:
    """Samples of a job in its order; the n-th epoch's batch is the same whoever samples it.

    While the caller's thread samples on the GPU, each of `num_workers` threads samples another batch with one core: the
    one that will be wanted about when it is done. Iterating yields `(n_id, batch_size, adjs)` as
    `GraphSageSampler.sample` returns them, on `device`. An exception in a thread or of the job is raised where its
    batch is due.

    Args:
        sample_job: The seeds.
        num_workers: Cores that sample beside the GPU.
        csr_topo, sizes, seed: See `GraphSageSampler`.
        device: Where results are, and which GPU samples; None is the current GPU if there is one, else the CPU.
        mode: `UVA_CPU_MIXED`, `GPU_CPU_MIXED`, `UVA_ONLY`, `GPU_ONLY` or `CPU_ONLY`. On a machine without a GPU the
            mixed modes are `CPU_ONLY`.

    Raises:
        ArgumentError, ArgumentTypeError, DeviceError: named argument, rule and value.
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
        self.job, self.mode = sample_job, mode
        self.num_workers = 0 if mode.endswith("ONLY") and mode != "CPU_ONLY" else num_workers
        self.seed, self._epoch = resolve_seed(seed), 0
        beside = _MODES[mode]
        self._gpu = None if beside is None else GraphSageSampler(csr_topo, sizes, device, beside, seed=self.seed)
        self.device = torch.device("cpu") if self._gpu is None else self._gpu.device
        self._on_cores = [GraphSageSampler(csr_topo, sizes, mode="CPU", seed=self.seed)
                          for _ in range(self.num_workers)]  # fmt: skip
        # Of the latest epoch: batches that the GPU and the cores sampled.
        self.num_on_gpu = self.num_on_cores = 0

    def __len__(self) -> int:
        """Number of batches."""
        return len(self.job)

    def __iter__(self) -> Iterator[Result]:
        """The samples of the next epoch."""
        self.job.shuffle()
        epoch, self._epoch = self._epoch, self._epoch + 1
        return self._iterate(epoch)

    def _iterate(self, epoch: int) -> Iterator[Result]:
        count, running = len(self.job), _Running(self._on_cores)
        self.num_on_gpu = self.num_on_cores = 0
        seconds, begin = 0.0, time.perf_counter()
        try:
            for position in range(count):
                while running.has_idle():
                    wanted = running.choose(position, seconds, self._gpu is not None)
                    if wanted >= count:
                        break
                    running.start(wanted, self.job, batch_key(self.seed, epoch, wanted))
                if position in running.results:
                    result = running.results.pop(position).result()
                    result = self._bring(result)
                    self.num_on_cores += 1
                else:
                    assert self._gpu is not None
                    result = self._gpu.sample(self.job[position], key=batch_key(self.seed, epoch, position))
                    self.num_on_gpu += 1
                yield result
                now = time.perf_counter()
                # From batch to batch, so that what the caller does with one counts.
                seconds = now - begin if seconds == 0 else (1 - _NEWEST) * seconds + _NEWEST * (now - begin)
                begin = now
        finally:
            running.close()

    def _bring(self, result: Result) -> Result:
        n_id, batch_size, adjs = result
        if self.device.type == "cpu":
            return result
        return n_id.to(self.device), batch_size, [adj.to(self.device) for adj in adjs]


class _Running:
    """What the cores are at."""

    def __init__(self, samplers: Sequence[GraphSageSampler]) -> None:
        self._idle = list(samplers)
        self._pool = ThreadPoolExecutor(len(samplers), "pyg_direct") if samplers else None
        self._last = -1
        self._seconds = 0.0
        self.results: dict[int, Future[Result]] = {}

    def has_idle(self) -> bool:
        """Whether a core has nothing to do."""
        return bool(self._idle)

    def choose(self, position: int, seconds: float, beside_gpu: bool) -> int:
        """The batch that a core begins when batch `position` is due and one comes every `seconds`."""
        lead = 0
        if beside_gpu:
            lead = 1 + math.ceil(self._seconds / seconds) if self._seconds > 0 and seconds > 0 else len(self._idle)
        return max(self._last + 1, position + lead)

    def start(self, index: int, job: SampleJob, key: int) -> None:
        """Let an idle core sample a batch. The job is asked in the caller's thread; its error waits for its turn."""
        assert self._pool is not None
        self._last = index
        try:
            seeds = job[index]
        except Exception as error:
            self.results[index] = Future()
            self.results[index].set_exception(error)
            return
        sampler = self._idle.pop()
        self.results[index] = self._pool.submit(self._sample, sampler, seeds, key)

    def _sample(self, sampler: GraphSageSampler, seeds: Any, key: int) -> Result:
        try:
            # Numba's number of threads belongs to the thread that set it.
            set_cpu_threads(1)
            begin = time.perf_counter()
            result = sampler.sample(seeds, key=key)
            took = time.perf_counter() - begin
            self._seconds = took if self._seconds == 0 else (1 - _NEWEST) * self._seconds + _NEWEST * took
            return result
        finally:
            self._idle.append(sampler)

    def close(self) -> None:
        """Wait for the cores and forget what they made."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self.results.clear()
