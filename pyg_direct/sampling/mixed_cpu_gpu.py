"""The batches of one job, sampled by a GPU or by several CPU cores: `SampleJob` and `MixedGraphSageSampler`, after
Quiver.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_direct.compiler.jit import set_cpu_threads
from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.object_text import one_line, show_count
from pyg_direct.ops.argument_checks import check_choice, check_count
from pyg_direct.runtime.cuda.device import resolve_device
from pyg_direct.runtime.host.threads import Pool
from pyg_direct.sampling.graphsage_sampler import Adj, GraphSageSampler
from pyg_direct.sampling.random_key import EpochKey, check_seed, draw_seed
from pyg_direct.typing import Device

# Mode of the sampler on the GPU; None for cores. Beside a GPU, 15 cores sampled 0 to 2 % of the batches, none faster.
_MODES = {"UVA_CPU_MIXED": "UVA", "GPU_CPU_MIXED": "GPU", "UVA_ONLY": "UVA", "GPU_ONLY": "GPU", "CPU_ONLY": None}

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

    A GPU samples all batches if the mode has one. Otherwise each of `num_workers` threads samples a batch with one
    core, and as many batches are sampled ahead. Iterating yields `(n_id, batch_size, adjs)` as
    `GraphSageSampler.sample` returns them, on `device`. An exception in a thread or of the job is raised when its batch
    is due.

    Args:
        sample_job: The seeds.
        num_workers: Cores that sample where no GPU does.
        csr_topo, sizes: See `GraphSageSampler`.
        seed: Seed of all draws; with None each epoch draws one number from torch's generator, and follows from it.
        device: Device of the results, and the GPU that samples; None is the current GPU, or the CPU without one.
        mode: `UVA_CPU_MIXED`, `GPU_CPU_MIXED`, `UVA_ONLY`, `GPU_ONLY` or `CPU_ONLY`. On a machine without a GPU the
            mixed modes are `CPU_ONLY`; with one they are `UVA_ONLY` and `GPU_ONLY`.

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
        check_count("num_workers", num_workers, 0)
        check_choice("mode", mode, _MODES)
        if mode.endswith("MIXED") and device is None and not torch.cuda.is_available():
            mode = "CPU_ONLY"
        if mode == "CPU_ONLY" and num_workers == 0:
            raise ArgumentError("num_workers must be at least 1 where only the CPU samples, got 0")
        if mode == "CPU_ONLY" and device is not None and resolve_device(device).type != "cpu":
            raise ArgumentError(f"device must be 'cpu' or None where only the CPU samples, got {device!r}")
        if mode != "CPU_ONLY" and device is not None and resolve_device(device).type == "cpu":
            raise ArgumentError(f"mode={mode!r} needs a GPU, got device={str(device)!r}: give mode='CPU_ONLY'")
        self.job, self.mode = sample_job, mode
        beside = _MODES[mode]
        self.num_workers = num_workers if beside is None else 0
        self.seed, self._epoch = check_seed(seed), 0
        self._gpu = None if beside is None else GraphSageSampler(csr_topo, sizes, device, beside, seed=self.seed)
        self.device = torch.device("cpu") if self._gpu is None else self._gpu.device
        self._on_cores = [GraphSageSampler(csr_topo, sizes, mode="CPU", seed=self.seed)
                          for _ in range(self.num_workers)]  # fmt: skip

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
        if self._gpu is None:
            yield from self._iterate_on_cores(key)
            return
        for position in range(len(self.job)):
            yield self._gpu.sample(self.job[position], key=key.of_batch(position))

    def _iterate_on_cores(self, key: EpochKey) -> Iterator[Result]:
        idle, ahead = list(self._on_cores), deque[Any]()
        pool = Pool(len(idle), "pyg_direct")

        def sample(seeds: Any, number: int) -> Result:
            # Numba's number of threads belongs to the thread that set it: the caller's, if no other can start.
            before, sampler = set_cpu_threads(1), idle.pop()
            try:
                return sampler.sample(seeds, key=number)
            finally:
                set_cpu_threads(before)
                idle.append(sampler)

        try:
            for position in range(len(self.job) + self.num_workers):
                if position >= self.num_workers:
                    due = ahead.popleft()
                    if isinstance(due, Exception):
                        raise due
                    yield due.result()
                if position < len(self.job):
                    ahead.append(self._begin(pool, sample, position, key))
        finally:
            pool.close()

    def _begin(self, pool: Pool, sample: Any, position: int, key: EpochKey) -> Any:
        """Let a core sample a batch. The job is asked in the caller's thread; its error waits for its turn."""
        try:
            seeds = self.job[position]
        except Exception as error:
            return error
        return pool.submit(sample, seeds, key.of_batch(position))
