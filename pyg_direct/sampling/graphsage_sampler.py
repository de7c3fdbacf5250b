"""`GraphSageSampler`: Quiver's sampler, with PyG's frontier, edge ids, and draws that can be drawn again.

`MixedGraphSageSampler`, after Quiver, samples the batches of one `SampleJob` by a GPU or by several CPU cores.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_direct.compiler.jit import set_cpu_threads
from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.kernels.batch_counters import MAX_HOPS
from pyg_direct.object_text import one_line, show_count
from pyg_direct.ops.argument_checks import (
    as_ids,
    check_choice,
    check_count,
    check_fanouts,
    check_ids,
    check_key,
    checks_keywords,
)
from pyg_direct.ops.local_ids.relabel_nodes import relabel
from pyg_direct.ops.sampling.sample_uniform import sample_neighbors
from pyg_direct.runtime.cuda.device import resolve_device
from pyg_direct.runtime.host.threads import Pool
from pyg_direct.sampling.random_key import EpochKey, call_key, check_seed, draw_seed
from pyg_direct.sampling.sampling_options import Recipe, check_hops
from pyg_direct.sampling.uniform_plan import open_plan
from pyg_direct.typing import Device

MODES = ("auto", "GPU", "UVA", "CPU")
_PLACEMENT = {"GPU": "cuda", "UVA": "unified", "CPU": "cpu", "auto": "auto"}


class Adj(NamedTuple):
    """One bipartite layer, in the order of PyG's `NeighborSampler`.

    Attributes:
        edge_index: Local (source, target), int64 `[2, E']`, sorted by target.
        e_id: Edge ids, int64 `[E']`.
        size: (number of source nodes, number of target nodes).

    Example:
        >>> topo = CSRTopo(torch.tensor([[1, 2, 3], [0, 0, 1]]))  # 1 and 2 lead to 0, 3 to 1
        >>> n_id, _, (adj,) = GraphSageSampler(topo, sizes=[-1], device="cpu").sample([0])
        >>> adj.edge_index.tolist(), adj.e_id.tolist(), adj.size
        ([[1, 2], [0, 0]], [0, 1], (3, 1))
    """

    edge_index: Tensor
    e_id: Tensor
    size: tuple[int, int]

    def to(self, *args: Any, **kwargs: Any) -> Adj:
        """Return the layer on another device."""
        return Adj(self.edge_index.to(*args, **kwargs), self.e_id.to(*args, **kwargs), self.size)


class GraphSageSampler:
    """Multi-hop neighbor sampler.

    A layer expands all nodes so far, as PyG's `NeighborSampler` and Quiver's sampler do; every node takes part with
    up to `sizes[l]` neighbors drawn without replacement (Hamilton et al., NeurIPS 2017, section 3.1).

    Args:
        csr_topo: The graph.
        sizes: Fanout of each layer, seeds outwards; -1 takes all neighbors.
        device: The device that samples and that results are on; None is the current GPU if there is one, otherwise
            the CPU.
        mode: `GPU` (topology in GPU memory), `UVA` (topology in unified host memory, read by the GPU), `CPU` or `auto`.
            With `auto`, if the topology fits half of the free GPU memory, it goes there, and otherwise to host memory.
            Without a GPU `auto` is `CPU`.
        seed: Seed of all draws: the n-th call of two samplers with one seed gives equal batches on any device. With
            None each call draws one number from torch's generator, and follows from it.
        topology_cache: With the topology on the host: GPU memory for the rows that save the most reads. A number of
            bytes, a size such as `"2G"`, a share of the edges such as `"20%"`, or `"auto"`.

    Raises:
        ArgumentError, ArgumentTypeError, DeviceError: named argument, rule and value.

    Example:
        >>> topo = CSRTopo(torch.tensor([[1, 2, 3], [0, 0, 1]]))  # 1 and 2 lead to 0, 3 to 1
        >>> sampler = GraphSageSampler(topo, sizes=[-1, -1], device="cpu")
        >>> n_id, batch_size, adjs = sampler.sample([0])
        >>> n_id.tolist(), batch_size
        ([0, 1, 2, 3], 1)
        >>> [(adj.edge_index.tolist(), adj.size) for adj in adjs]  # outermost first
        [([[1, 2, 3], [0, 0, 1]], (4, 3)), ([[1, 2], [0, 0]], (3, 1))]
    """

    @checks_keywords
    def __init__(self, csr_topo: CSRTopo, sizes: Sequence[int], device: Device = None, mode: str = "auto", *,
                 seed: int | None = None, topology_cache: int | str | None = None) -> None:  # fmt: skip
        if not isinstance(csr_topo, CSRTopo):
            raise ArgumentTypeError(f"csr_topo must be a CSRTopo, got {type(csr_topo).__name__}")
        check_choice("mode", mode, MODES)
        self.csr_topo = csr_topo
        self.sizes = check_fanouts("sizes", sizes)
        check_hops(self.sizes, MAX_HOPS, "sizes")
        if mode == "CPU":
            if device is not None and (isinstance(device, int) or torch.device(device).type != "cpu"):
                raise ArgumentError(f"device must be 'cpu' or None with mode='CPU', got {device!r}")
            self.device = torch.device("cpu")
        else:
            self.device = resolve_device("cuda" if device is None and mode in ("GPU", "UVA") else device)
            if self.device.type == "cpu" and mode in ("GPU", "UVA"):
                raise ArgumentError(f"mode={mode!r} needs a GPU, got device={str(device)!r}")
        self._chooses_device = device is None and mode != "CPU"
        self.mode = mode
        self.topology_cache = topology_cache
        self.seed = check_seed(seed)
        self._num_calls = 0
        self._open()

    def _open(self) -> None:
        self._topology = self.csr_topo.place(_PLACEMENT[self.mode], self.device,
                                             topology_cache=self.topology_cache)  # fmt: skip
        self._plan = open_plan(self._topology, Recipe(tuple(self.sizes), expand_all=True))

    def sample(self, input_nodes: Tensor | Sequence[int], *, key: int | None = None) -> tuple[Tensor, int, list[Adj]]:
        """Sample around seeds.

        Args:
            input_nodes: Seeds, int64 or int32 `[B]` on any device, or a list; repeats keep their rows.
            key: Draw under this key instead of the sampler's own count of calls.

        Returns:
            `(n_id, batch_size, adjs)`: global ids of all nodes, int64 `[M]`, seeds first; B; the layers, outermost
            first. Quiver's order; PyG's `NeighborSampler` puts `batch_size` first.

        Raises:
            ArgumentError, ArgumentTypeError: named argument, rule and value.
            IdError: a seed lies outside the graph.
        """
        # A default device, or devices by name, would look at each call of torch below.
        with torch._C.DisableTorchFunction():
            self._topology.check_process()
            seeds = self._read_seeds("input_nodes", input_nodes)
            if key is None:
                key = call_key(self.seed, self._num_calls)
                self._num_calls += 1
            sample = self._plan.sample(seeds, check_key("key", key))
            adjs = []
            for hop in range(len(self.sizes)):
                part = slice(sample.edge_counts[hop], sample.edge_counts[hop + 1])
                size = (sample.node_counts[hop + 1], sample.node_counts[hop])
                adjs.append(Adj(sample.edge_index[:, part], sample.e_id[part], size))
            return sample.n_id, seeds.numel(), adjs[::-1]

    def sample_layer(self, batch: Tensor | Sequence[int], size: int, *, key: int | None = None
                     ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Sample one hop.

        Args:
            batch: Nodes to expand, int32 or int64 `[B]` on any device, or a list.
            size: Neighbors of each at most; -1 takes all.
            key: Draw under this key instead of the sampler's own count of calls.

        Returns:
            `(neighbors, counts)`: the neighbors, node after node, int64 `[E']`; how many each node has, int64 `[B]`.

        Raises:
            ArgumentError, ArgumentTypeError: named argument, rule and value.
            IdError: a node lies outside the graph.
        """
        topology = self._topology
        nodes = self._read_seeds("batch", batch).to(self.device)
        if key is None:
            key = call_key(self.seed, self._num_calls)
            self._num_calls += 1
        picks = sample_neighbors(topology.indptr, topology.indices, nodes, fanout=size, key=key,
                                 edge_ids=topology.edge_ids, pairs=topology.pairs)  # fmt: skip
        return picks.nodes.long(), picks.counts

    def reindex(self, inputs: Tensor, outputs: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Number the nodes of one hop.

        Args:
            inputs: Nodes that were expanded, int32 or int64 `[B]`, on any device.
            outputs: Their neighbors, node after node, int32 or int64 `[E']`.
            counts: Neighbors of each of `inputs`, int64 `[B]`.

        Returns:
            `(n_id, targets, sources)`, int64 on the sampler's device: ids of the nodes, `[M]`, with `inputs` first; the
            place in them of the target, and of the source, of every edge, `[E']` each.

        Raises:
            ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
        """
        self._topology.check_process()
        inputs, outputs = self._read_seeds("inputs", inputs), self._read_seeds("outputs", outputs)
        if counts.shape != inputs.shape:
            raise ArgumentError(f"counts must have shape {tuple(inputs.shape)}, one for each of inputs, got "
                                f"{tuple(counts.shape)}")  # fmt: skip
        targets = torch.arange(inputs.numel(), device=self.device).repeat_interleave(counts.to(self.device))
        if targets.numel() != outputs.numel():
            raise ArgumentError(f"counts must add up to the {outputs.numel()} outputs, got {targets.numel()}")
        numbered = relabel(inputs.to(self.device), outputs.to(self.device), self.csr_topo.node_count)
        return numbered.n_id, targets, numbered.local

    def sample_prob(self, train_idx: Tensor, total_node_count: int) -> Tensor:
        """Chance of each node to be met in a sample around all of `train_idx`, float32 `[N]`.

        A node is met if one of the rows that list it picks it; rows count as independent. Quiver ranks its caches by
        this estimate.

        Args:
            train_idx: Seeds, int32 or int64 `[S]`, on any device.
            total_node_count: N.

        Raises:
            ArgumentError, ArgumentTypeError: `total_node_count` is another number, or `train_idx` no ids.
            IdError: a seed lies outside the graph.
        """
        topology = self._topology
        if total_node_count != topology.num_nodes:
            raise ArgumentError(
                f"total_node_count must be the number of nodes {topology.num_nodes}, got {total_node_count}"
            )
        prob = torch.zeros(total_node_count, dtype=torch.float64, device=self.device)
        prob[self._read_seeds("train_idx", train_idx).to(self.device)] = 1.0
        degree = topology.indptr.diff()
        for size in self.sizes:
            share = torch.ones_like(prob) if size < 0 else (size / degree.clamp(min=1)).clamp(max=1.0)
            missed = torch.log1p(-(prob * share).clamp(max=1 - 1e-12))
            total = torch.zeros_like(prob)
            step = 1 << 24
            for begin in range(0, topology.num_edges, step):
                end = min(begin + step, topology.num_edges)
                edges = torch.arange(begin, end, device=self.device)
                rows = torch.searchsorted(topology.indptr, edges, right=True) - 1
                total.index_add_(0, topology.indices[begin:end].long(), missed[rows])
            prob = 1 - (1 - prob) * total.exp()
        return prob.float()

    def share_ipc(self) -> tuple[CSRTopo, list[int], str]:
        """Return the parts to build this sampler in another process: (topology in shared memory, sizes, mode)."""
        return self.csr_topo.share_memory_(), self.sizes, self.mode

    @classmethod
    def lazy_from_ipc_handle(cls, ipc_handle: tuple[CSRTopo, list[int], str]) -> GraphSageSampler:
        """Return the sampler of `share_ipc` in this process.

        Args:
            ipc_handle: Result of `share_ipc`: (topology, sizes, mode).

        Raises:
            DeviceError: its mode needs a GPU, and this process sees none.
        """
        csr_topo, sizes, mode = ipc_handle
        return cls(csr_topo, sizes, mode=mode)

    def _read_seeds(self, name: str, nodes: Tensor | Sequence[int]) -> Tensor:
        nodes = check_ids(name, as_ids(name, nodes), self.csr_topo.node_count).long()
        return nodes.cpu() if self.device.type == "cpu" else nodes

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_plan", "_topology")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __getattr__(self, name: str) -> Any:
        # A sampler that was sent opens at its first use. If no GPU was named, it takes the current one, which its
        # process has chosen by then.
        if name in ("_plan", "_topology") and "_chooses_device" in self.__dict__:
            if self._chooses_device:
                self.device = resolve_device("cuda" if self.mode in ("GPU", "UVA") else None)
            self._open()
            return self.__dict__[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @one_line
    def __repr__(self) -> Iterator[str]:
        yield repr(self.csr_topo)
        yield from (f"sizes={self.sizes}", f"device={self.device}", f"mode={self.mode!r}")


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
