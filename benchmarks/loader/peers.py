"""Samplers and tables of other projects beside ours, each called through its own public API on one graph.

A peer that is not installed is left out. Two frontiers exist, and only samplers of one of them are compared. PyG's
`NeighborLoader` expands the nodes new in the last hop; PyG's old `NeighborSampler` expands all nodes so far.
"""

from __future__ import annotations

import functools
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_direct.bench.beside import OURS, WINDOWS, Contender, rows_of_contest
from pyg_direct.bench.limits import device_copy_rate, pinned_copy_rate, random_read_rate_of_cpu, wait_for_gpu
from pyg_direct.bench.result_row import Row
from pyg_direct.bench.sampling import FANOUTS
from pyg_direct.compiler.jit import set_cpu_threads
from pyg_direct.features.feature import Feature
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.runtime.cuda.device import resolve_device
from pyg_direct.sampling.graphsage_sampler import GraphSageSampler
from pyg_direct.sampling.sampling_options import Recipe
from pyg_direct.sampling.uniform_plan import GpuPlan, open_plan

# Seeds, int64 `[B]` on the CPU, to the number of edges sampled around them.
Sampler = Callable[[Tensor], int]
# Quiver and WholeGraph read the memory they were given for as long as the process lives.
_KEPT: list[Any] = []


class Rows(NamedTuple):
    """A graph as peers take it, on the CPU: int64 `indptr` `[N + 1]`, `indices` and `edge_ids` `[E]`."""

    indptr: Tensor
    indices: Tensor
    edge_ids: Tensor


class Peer(NamedTuple):
    """A project that samples neighbors.

    Attributes:
        title: As its row is named, with the version.
        modules: Modules that must be installed; `modules[0]` is imported.
        placements: Kinds of memory that can hold a topology, in our words.
        expand_all: Whether a hop expands all nodes so far.
    """

    title: str
    modules: tuple[str, ...]
    distribution: str
    placements: tuple[str, ...]
    expand_all: bool
    open: Callable[[Rows, str, tuple[int, ...]], Sampler]
    note: str = "with e_id"

    @property
    def is_installed(self) -> bool:
        """True if all its modules are found."""
        return all(find_spec(module) is not None for module in self.modules)

    @property
    def name(self) -> str:
        """Title and version."""
        return f"{self.title} {metadata.version(self.distribution)}"


def open_peers(
    rows: Rows, placement: str, fanouts: tuple[int, ...], *, expand_all: bool
) -> Iterator[tuple[Peer, Sampler]]:
    """Open the installed peers of one frontier that can keep a topology there, each with its sampler."""
    for peer in PEERS:
        if peer.is_installed and placement in peer.placements and peer.expand_all == expand_all:
            try:
                yield peer, peer.open(rows, placement, fanouts)
            except (ImportError, OSError) as error:
                warnings.warn(f"{peer.name} is installed and cannot be used: {error}", stacklevel=2)


def _open_glt(rows: Rows, placement: str, fanouts: tuple[int, ...], *, with_edge: bool = True) -> Sampler:
    if os.environ.get("TORCH_CPP_LOG_LEVEL") != "ERROR":
        # GLT sets it when it is imported, which is too late for a torch that is loaded already.
        warnings.warn("GLT is slowed down by torch's warnings; start with TORCH_CPP_LOG_LEVEL=ERROR", stacklevel=2)
    glt = import_module("graphlearn_torch")
    topology = glt.data.Topology((rows.indptr.clone(), rows.indices.clone()), rows.edge_ids.clone(), input_layout="CSR")
    graph = glt.data.Graph(topology, {"cuda": "CUDA", "unified": "ZERO_COPY"}[placement], 0)
    make = functools.partial(glt.sampler.NeighborSampler, graph, list(fanouts), torch.device("cuda:0"), with_edge)
    # It sizes its hash table by its first batch.
    of_size = functools.cache(lambda num_seeds: make())

    def sample(seeds: Tensor) -> int:
        inputs = glt.sampler.NodeSamplerInput(node=seeds)
        return int(of_size(seeds.numel()).sample_from_nodes(inputs).row.numel())

    return sample


def _open_pyg_lib(rows: Rows, placement: str, fanouts: tuple[int, ...]) -> Sampler:
    neighbor_sample = import_module("pyg_lib").sampler.neighbor_sample

    def sample(seeds: Tensor) -> int:
        out = neighbor_sample(rows.indptr, rows.indices, seeds, list(fanouts), csc=True)
        # As PyG's loader does for edges that were not sorted.
        return int(rows.edge_ids[out[3]].numel())

    return sample


def _open_torch_sparse(rows: Rows, placement: str, fanouts: tuple[int, ...]) -> Sampler:
    import_module("torch_sparse")

    def sample(seeds: Tensor) -> int:
        out = torch.ops.torch_sparse.neighbor_sample(rows.indptr, rows.indices, seeds, list(fanouts), False, True)
        return int(rows.edge_ids[out[3]].numel())

    return sample


def _open_quiver(rows: Rows, placement: str, fanouts: tuple[int, ...]) -> Sampler:
    quiver = import_module("quiver")
    topology = quiver.CSRTopo(indptr=rows.indptr, indices=rows.indices.clone())
    _KEPT.append(topology)
    sampler = quiver.pyg.GraphSageSampler(topology, list(fanouts), 0, {"cuda": "GPU", "unified": "UVA"}[placement])

    def sample(seeds: Tensor) -> int:
        return sum(int(adj.edge_index.shape[1]) for adj in sampler.sample(seeds)[2])

    return sample


@functools.cache
def whole_graph_communicator() -> Any:
    """WholeGraph's communicator of this one process."""
    threads = torch.get_num_threads()
    found = import_module("pylibwholegraph.torch").init_torch_env_and_create_wm_comm(0, 1, 0, 1, wm_log_level="error")
    torch.set_num_threads(threads)
    return found[0]


def whole_graph_tensor(array: Tensor, placement: str) -> Any:
    """Make a copy of a tensor `[N]` or `[N, F]` in WholeGraph's memory, on the GPU or page-locked."""
    on_gpu = placement == "cuda"
    tensor = import_module("pylibwholegraph.torch").create_wholememory_tensor(
        whole_graph_communicator(), "continuous", "cuda" if on_gpu else "cpu", list(array.shape), array.dtype, None
    )
    tensor.get_local_tensor(host_view=not on_gpu)[0].copy_(array)
    _KEPT.append(tensor)
    return tensor


def _open_whole_graph(rows: Rows, placement: str, fanouts: tuple[int, ...]) -> Sampler:
    graph = import_module("pylibwholegraph.torch").GraphStructure()
    graph.set_csr_graph(whole_graph_tensor(rows.indptr, placement), whole_graph_tensor(rows.indices, placement))

    def sample(seeds: Tensor) -> int:
        edges = graph.multilayer_sample_without_replacement(seeds.cuda(), list(fanouts))[1]
        return sum(int(hop.shape[1]) for hop in edges)

    return sample


_ON_GPU = ("cuda", "unified")
PEERS = (
    Peer("GLT", ("graphlearn_torch",), "graphlearn-torch", _ON_GPU, False, _open_glt),
    # It reads the ids of edges from the memory of the graph, which costs it most of the time there.
    Peer("GLT without e_id", ("graphlearn_torch",), "graphlearn-torch", ("unified",), False,
         functools.partial(_open_glt, with_edge=False), "without e_id"),
    Peer("pyg-lib", ("pyg_lib",), "pyg-lib", ("cpu",), False, _open_pyg_lib, "with e_id, one thread"),
    Peer("torch-sparse", ("torch_sparse",), "torch-sparse", ("cpu",), False, _open_torch_sparse,
         "with e_id, one thread"),
    Peer("Quiver", ("quiver", "torch_quiver"), "torch-quiver", _ON_GPU, True, _open_quiver, "without e_id"),
    Peer("WholeGraph", ("pylibwholegraph",), "pylibwholegraph-cu13", _ON_GPU, True, _open_whole_graph,
         "without e_id"),
)  # fmt: skip


_WINDOW_SECONDS = 0.1


def hold_contest(contenders: Sequence[Contender], batches: Sequence[Tensor], *, alone: bool = True) -> None:
    """Measure all of them; slower ones get fewer batches a window.

    Args:
        batches: Seeds of each batch; a window takes as many as fit it, at least two.
        alone: Whether to time batches with nothing before or after them too.
    """
    counts = []
    for contender in contenders:
        contender.run(batches[:2])
        counts.append(max(2, min(len(batches), int(2 * _WINDOW_SECONDS / contender.measure(batches[:2])))))
        contender.rates.clear()
        contender.work.clear()
    for _ in range(WINDOWS):
        for contender, count in zip(contenders, counts, strict=True):
            contender.measure(batches[:count])
            if alone:
                contender.measure_alone(batches[: min(count, 4)])


# Ids, int64 `[B]` on the GPU, to their rows there.
Reader = Callable[[Tensor], Tensor]


def open_tables(table: Tensor, placement: str) -> Iterator[tuple[str, Reader]]:
    """Tables of torch and of the installed peers that hold `table`, float32 `[N, F]`, on the GPU or on the host."""
    name, reader = _table_of_torch(table, placement)
    yield name, reader
    for peer in PEERS:
        if peer.title in _OPENERS and peer.is_installed:
            yield peer.name, _OPENERS[peer.title](table, placement)


def _table_of_torch(table: Tensor, placement: str) -> tuple[str, Reader]:
    if placement == "cuda":
        on_gpu = table.cuda()
        return "torch.index_select", lambda ids: torch.index_select(on_gpu, 0, ids)
    return "torch.index_select on the CPU, then a copy", lambda ids: torch.index_select(table, 0, ids.cpu()).cuda()


def _table_of_glt(table: Tensor, placement: str) -> Reader:
    feature = import_module("graphlearn_torch").data.Feature(
        table.clone(), split_ratio=float(placement == "cuda"), device=0
    )
    return lambda ids: feature[ids]


def _table_of_quiver(table: Tensor, placement: str) -> Reader:
    cache = table.numel() * table.element_size() if placement == "cuda" else 0
    feature = import_module("quiver").Feature(0, [0], device_cache_size=cache)
    feature.from_cpu_tensor(table.clone())
    return lambda ids: feature[ids]


def _table_of_whole_graph(table: Tensor, placement: str) -> Reader:
    tensor = whole_graph_tensor(table, placement)
    return lambda ids: tensor.gather(ids)


_OPENERS: dict[str, Callable[[Tensor, str], Reader]] = {
    "GLT": _table_of_glt,
    "Quiver": _table_of_quiver,
    "WholeGraph": _table_of_whole_graph,
}


_BATCHES = 50


def measure_samplers_on_gpu(topology: CSRTopo, name: str, sizes: Sequence[int] = (1024, 8192)) -> Iterator[Row]:
    """Edges a second of both frontiers, topology in GPU memory and on the host."""
    rows = rows_of(topology)
    for placement in ("cuda", "unified"):
        for expand_all, frontier in ((False, "new nodes"), (True, "all nodes")):
            peers = list(open_peers(rows, placement, FANOUTS, expand_all=expand_all))
            for size in sizes:
                contenders = [Contender(OURS, _run_ours(topology, placement, expand_all), "with e_id")]
                contenders += [Contender(peer.name, _run_each(sampler), peer.note) for peer, sampler in peers]
                hold_contest(contenders, _seeds(topology.node_count, size))
                yield from rows_of_contest(f"peers/{name}/{placement}/{size}/{frontier}", contenders, "G/s")


def measure_samplers_on_cpu(topology: CSRTopo, name: str, size: int = 1024) -> Iterator[Row]:
    """Edges a second of one thread of ours, of the one thread of each peer, and of two threads of ours."""
    rows = rows_of(topology)
    plan = open_plan(topology.place("cpu", "cpu"), Recipe(FANOUTS))
    before, torch_before = set_cpu_threads(1), torch.get_num_threads()
    torch.set_num_threads(1)

    def run_with(threads: int) -> Callable[[Sequence[Tensor]], int]:
        def run(batches: Sequence[Tensor]) -> int:
            set_cpu_threads(threads)
            return sum(plan.sample(seeds, number).edge_counts[-1] for number, seeds in enumerate(batches))

        return run

    def run_side_by_side(batches: Sequence[Tensor]) -> int:
        return sum(sample.edge_counts[-1] for sample in pool.map(plan.sample, batches, range(len(batches))))

    try:
        contenders = [Contender(f"{OURS}, 1 thread", run_with(1), "with e_id")]
        for peer, sampler in open_peers(rows, "cpu", FANOUTS, expand_all=False):
            contenders.append(Contender(f"{peer.name}, 1 thread", _run_each(sampler), peer.note))
        contenders.append(Contender(f"{OURS}, 2 threads on a batch", run_with(2), "with e_id"))
        pool = ThreadPoolExecutor(2, initializer=set_cpu_threads, initargs=(1,))
        contenders.append(Contender(f"{OURS}, 2 threads, a batch each", run_side_by_side, "with e_id"))
        hold_contest(contenders, _seeds(topology.node_count, size), alone=False)
        pool.shutdown()
        limit = random_read_rate_of_cpu(1) / 1e6
        yield from rows_of_contest(f"peers/{name}/cpu/{size}", contenders, "M/s", limit,
                                   "random 4-byte reads a second of one thread, one an edge")  # fmt: skip
    finally:
        set_cpu_threads(before)
        torch.set_num_threads(torch_before)


def measure_tables(num_bytes: int = 4 << 30, width: int = 128, num_ids: int = 1 << 20) -> Iterator[Row]:
    """Bytes a second of random float32 rows, all of them in GPU memory or all on the host."""
    table = torch.empty(num_bytes // (4 * width), width)
    table[:, 0], table[:, 1:] = torch.arange(len(table)), 1.0
    ids = torch.randint(len(table), (num_ids,), device="cuda")
    for placement, place, unit, scale in (("cuda", "hot", "TB/s", 1e12), ("unified", "cold", "GB/s", 1e9)):
        feature = Feature(device_cache_size="100%" if place == "hot" else 0).from_cpu_tensor(table.clone())
        readers = {OURS: feature.__getitem__, **dict(open_tables(table, placement))}
        seconds: dict[str, list[float]] = {reader: [] for reader in readers}
        for window in range(WINDOWS + 1):
            for reader, read in readers.items():
                seconds[reader].append(_time_reads(read, ids, 16 if place == "hot" else 2, check=window == 0))
        limit = device_copy_rate() / 2 if place == "hot" else pinned_copy_rate()
        limit_name = "half of a device copy" if place == "hot" else "page-locked copy"
        for reader, times in seconds.items():
            rates = [num_ids * width * 4 / s / scale for s in times[1:]]
            case = f"peers/gather/{4 * width} B/{num_bytes >> 30} GiB {place}"
            yield Row.of(case, reader, unit, rates, limit / scale, limit_name)


def rows_of(topology: CSRTopo) -> Rows:
    """Return a topology as peers take it."""
    eid = torch.arange(topology.edge_count) if topology.eid is None else topology.eid.cpu().long()
    return Rows(topology.indptr.cpu(), topology.indices.cpu().long(), eid)


def _seeds(num_nodes: int, size: int) -> list[Tensor]:
    # No seed twice in a batch: peers treat repeats in different ways.
    return [torch.randperm(num_nodes)[:size] for _ in range(10)] * (_BATCHES // 10)


def _run_each(sample: Sampler) -> Callable[[Sequence[Tensor]], int]:
    return lambda batches: sum(sample(seeds) for seeds in batches)


def _run_ours(topology: CSRTopo, placement: str, expand_all: bool) -> Callable[[Sequence[Tensor]], int]:
    if expand_all:
        sampler = GraphSageSampler(topology, FANOUTS, mode="GPU" if placement == "cuda" else "UVA")
        return _run_each(lambda seeds: sum(adj.edge_index.shape[1] for adj in sampler.sample(seeds)[2]))
    plan = open_plan(topology.place(placement, resolve_device("cuda")), Recipe(FANOUTS))
    assert isinstance(plan, GpuPlan)

    def run(batches: Sequence[Tensor]) -> int:
        # One batch ahead, as the loader does.
        pending = [plan.submit(batches[0], 0)]
        edges = 0
        for number, seeds in enumerate(batches[1:], 1):
            pending.append(plan.submit(seeds, number))
            edges += pending.pop(0).finish().edge_counts[-1]
        return edges + pending[0].finish().edge_counts[-1]

    return run


def _time_reads(read: Callable[[Tensor], Tensor], ids: Tensor, count: int, *, check: bool) -> float:
    if check and not torch.equal(read(ids)[:, 0].long(), ids):
        raise RuntimeError("a table returned other rows than it was asked for")
    wait_for_gpu()
    begin = time.perf_counter()
    for _ in range(count):
        read(ids)
    wait_for_gpu()
    return (time.perf_counter() - begin) / count
