"""Compilation ahead of use, in several processes: CPU loops by small programs, GPU kernels by their declarations."""

from __future__ import annotations

import importlib
import math
import multiprocessing
import os
import pkgutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GAT, GCN, GIN, GATConv, GraphSAGE, HeteroConv, SAGEConv

import pyg_direct
import pyg_direct.kernels
from pyg_direct.cli.cache import Kind, list_kept
from pyg_direct.compiler.code_cache import find_shipped
from pyg_direct.compiler.jit import GPU_KERNELS, GpuKernel, run_alone
from pyg_direct.compiler.link_once import replaced
from pyg_direct.compiler.nvrtc import nearest_target
from pyg_direct.datasets.dynamic_graphs import synthetic_dtdg
from pyg_direct.errors import DeviceError
from pyg_direct.ops import run_kernel
from pyg_direct.ops.rows.gather_rows import FEW_BYTES, gather_rows
from pyg_direct.ops.rows.graph_rows import LoopChoice
from pyg_direct.progress import Bar
from pyg_direct.runtime.cuda.device import abilities
from pyg_direct.runtime.cuda.launch import load_function
from pyg_direct.runtime.host.host_memory import count_cores

_NODES, _EDGES, _WIDTH = 60, 400, 64
_FANOUTS = [3, 2]
_SEEDS = torch.arange(16)
_CITES, _WRITES = ("paper", "cites", "paper"), ("author", "writes", "paper")


def _draw_edges(sources: int = _NODES, targets: int = _NODES) -> Tensor:
    return torch.stack([torch.randint(sources, (_EDGES,)), torch.randint(targets, (_EDGES,))])


def _make_data() -> Data:
    """A graph with rows, labels, times and weights of everything."""
    return Data(x=torch.rand(_NODES, _WIDTH), y=torch.randint(4, (_NODES,)), edge_index=_draw_edges(),
                edge_attr=torch.rand(_EDGES, 4), edge_weight=torch.rand(_EDGES) + 0.1,
                edge_time=torch.randint(9, (_EDGES,)), time=torch.randint(9, (_NODES,)))  # fmt: skip


def _make_typed() -> HeteroData:
    data = HeteroData()
    for kind, count in (("paper", _NODES), ("author", _NODES // 2)):
        data[kind].x, data[kind].y = torch.rand(count, _WIDTH), torch.randint(4, (count,))
        data[kind].time = torch.randint(9, (count,))
    for source, name, target in (_CITES, _WRITES, ("paper", "rev_writes", "author")):
        edges = data[source, name, target]
        edges.edge_index = _draw_edges(data[source].num_nodes, data[target].num_nodes)
        edges.edge_weight, edges.edge_time = torch.rand(_EDGES) + 0.1, torch.randint(9, (_EDGES,))
    return data


def _read(*loaders: Iterable[object]) -> None:
    for loader in loaders:
        for _ in loader:
            pass


def _train(model: torch.nn.Module, *graphs: Data | HeteroData) -> None:
    pyg_direct.accelerate(model)
    for graph in graphs:
        if isinstance(graph, HeteroData):
            sum(rows.sum() for rows in model(graph.x_dict, graph.edge_index_dict).values()).backward()
        else:
            model(graph.x, graph.edge_index).sum().backward()


def sample_uniformly() -> None:
    """Neighbors of nodes, each option of subgraphs, and layers as GraphSAGE's old sampler gives them."""
    data = _make_data()
    del data.time, data.edge_time
    for options in ({}, {"replace": True}, {"disjoint": True}, {"subgraph_type": "induced"},
                    {"subgraph_type": "bidirectional"}, {"shuffle": True}):  # fmt: skip
        _read(pyg_direct.NeighborLoader(data, _FANOUTS, _SEEDS, batch_size=8, device="cpu", **options))
    _read(pyg_direct.NeighborLoader(data, [-1, 2], _SEEDS, batch_size=8, device="cpu"))
    topology = pyg_direct.CSRTopo(data.edge_index, num_nodes=_NODES)
    pyg_direct.GraphSageSampler(topology, _FANOUTS, "cpu", "CPU").sample(_SEEDS)
    pyg_direct.Feature(device="cpu").from_cpu_tensor(data.x)[_SEEDS]


def read_rows() -> None:
    """Rows in units of 8, 4, 2 and 1 bytes, as many as loops are taken for."""
    for row in (
        torch.empty(16),
        torch.empty(3),
        torch.empty(3, dtype=torch.float16),
        torch.empty(3, dtype=torch.uint8),
    ):
        table = row.new_zeros(_NODES, len(row))
        count = 2 * FEW_BYTES // (len(row) * row.element_size())
        for dtype in (torch.int64, torch.int32):
            gather_rows(table, torch.zeros(count, dtype=dtype))


def sample_by_time() -> None:
    """Neighbors up to the time of a seed, by times of edges and of nodes."""
    data = _make_data()
    for strategy in ("uniform", "last"):
        for name, times in (("edge_time", torch.full((len(_SEEDS),), 6)), ("time", None)):
            _read(pyg_direct.NeighborLoader(data, _FANOUTS, _SEEDS, batch_size=8, device="cpu", time_attr=name,
                                            input_time=times, temporal_strategy=strategy))  # fmt: skip


def sample_by_weight() -> None:
    """Neighbors drawn by weight, with and without replacement."""
    for replace in (False, True):
        _read(pyg_direct.NeighborLoader(_make_data(), _FANOUTS, _SEEDS, batch_size=8, device="cpu",
                                        weight_attr="edge_weight", replace=replace))  # fmt: skip


def sample_links() -> None:
    """Links with negatives, with and without times."""
    data = _make_data()
    links, labels = data.edge_index[:, :16], torch.ones(16)
    for negatives in (None, {"mode": "binary", "amount": 1}, {"mode": "triplet", "amount": 2}):
        given = labels if negatives is None else None
        _read(pyg_direct.LinkNeighborLoader(data, _FANOUTS, links, given, neg_sampling=negatives, batch_size=8,
                                            device="cpu"))  # fmt: skip
    _read(pyg_direct.LinkNeighborLoader(data, _FANOUTS, links, time_attr="edge_time", batch_size=8, device="cpu",
                                        edge_label_time=torch.full((16,), 6), neg_sampling="binary"))  # fmt: skip


def sample_types() -> None:
    """Typed neighbors: uniformly, by weight, by time, disjoint, and HGT's."""
    data = _make_typed()
    seeds = "paper", _SEEDS
    for options in ({}, {"replace": True}, {"disjoint": True}, {"weight_attr": "edge_weight"},
                    {"time_attr": "edge_time", "input_time": torch.full((16,), 6)}, {"time_attr": "time"},
                    {"time_attr": "time", "temporal_strategy": "last"}):  # fmt: skip
        _read(pyg_direct.NeighborLoader(data, _FANOUTS, seeds, batch_size=8, device="cpu", **options))
    _read(pyg_direct.HGTLoader(data, [8, 8], seeds, batch_size=8, device="cpu"))


def sample_typed_links() -> None:
    """Typed links with negatives, with and without times."""
    data = _make_typed()
    links = _WRITES, data[_WRITES].edge_index[:, :16]
    times = torch.full((16,), 6)
    ways: tuple[dict[str, Any], ...] = ({}, {"time_attr": "time", "edge_label_time": times},
                                        {"time_attr": "edge_time", "edge_label_time": times})  # fmt: skip
    for options in ways:
        for negatives in (None, "binary", {"mode": "triplet", "amount": 2}):
            _read(pyg_direct.LinkNeighborLoader(data, _FANOUTS, links, neg_sampling=negatives, batch_size=8,
                                                device="cpu", **options))  # fmt: skip


def load_otherwise() -> None:
    """The other loaders, and walks."""
    data = _make_data()
    _read(pyg_direct.ShaDowKHopSampler(data, 2, 3, node_idx=_SEEDS, batch_size=8, device="cpu"),
          pyg_direct.RandomNodeLoader(data, 4, device="cpu"),
          pyg_direct.GraphSAINTRandomWalkSampler(data, 8, 2, num_steps=2, device="cpu"))  # fmt: skip
    # As in a program that has joined batches for a while.
    with replaced(LoopChoice, "seconds", math.inf):
        for make in (_make_data, _make_typed):
            _read(pyg_direct.DataLoader([make() for _ in range(4)], 2, device="cpu"))
    topology = pyg_direct.CSRTopo(data.edge_index, num_nodes=_NODES)
    pyg_direct.random_walk(topology, _SEEDS, 3)
    pyg_direct.random_walk(topology, _SEEDS, 3, p=2.0, q=0.5)


def train_layers() -> None:
    """Passes of accelerated layers in both directions, on a batch and on a whole graph."""
    data = _make_data()
    (batch,) = pyg_direct.NeighborLoader(data, _FANOUTS, _SEEDS, batch_size=16, device="cpu")
    for kind in (GraphSAGE, GCN, GIN, GAT):
        _train(kind(_WIDTH, 64, num_layers=2, out_channels=4), batch, data)
    for aggregation in ("max", "min", "std"):
        _train(SAGEConv(_WIDTH, 64, aggr=aggregation), batch)


def train_typed_layers() -> None:
    """Passes of accelerated layers over several relations, in both directions."""
    data = _make_typed()
    (batch,) = pyg_direct.NeighborLoader(data, _FANOUTS, ("paper", _SEEDS), batch_size=16, device="cpu")
    for make in (lambda: SAGEConv(_WIDTH, 64), lambda: GATConv(_WIDTH, 64, add_self_loops=False)):
        _train(HeteroConv({relation: make() for relation in data.edge_types}, aggr="sum"), batch)


def train_snapshots() -> None:
    """A recurrent layer over a stream of snapshots."""
    from pyg_direct.dynamic import FrameTrainer
    from pyg_direct.dynamic.nn import TGCN

    signal = synthetic_dtdg(num_nodes=_NODES, num_edges=_EDGES, num_snapshots=4)
    width = signal[0].x.shape[1]

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.out = TGCN(width, 8), torch.nn.Linear(8, 1)

        def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            state = self.layer(x, edge_index, weight, state)
            return self.out(state).view(-1), state

    model = Model()
    FrameTrainer(model, signal, torch.optim.Adam(model.parameters()), window=2, device="cpu").fit(2)


def cut_into_parts() -> None:
    """A partition of a graph, with rows."""
    from pyg_direct.distributed import partition_graph

    data = _make_data()
    with tempfile.TemporaryDirectory() as folder:
        for method in ("hash", "streaming"):
            partition_graph(Path(folder) / method, data.edge_index, 2, num_nodes=_NODES, method=method,
                            node_rows={"x": data.x})  # fmt: skip


CASES: dict[str, Callable[[], None]] = {
    "uniform": sample_uniformly,
    "rows": read_rows,
    "times": sample_by_time,
    "weights": sample_by_weight,
    "links": sample_links,
    "types": sample_types,
    "typed-links": sample_typed_links,
    "loaders": load_otherwise,
    "layers": train_layers,
    "typed-layers": train_typed_layers,
    "snapshots": train_snapshots,
    "partition": cut_into_parts,
}


def run_case(name: str) -> None:
    """Run a case as small work of one thread, as large work that all threads share, and in a thread's place."""
    case = CASES[name]
    case()
    with replaced(run_kernel, "FEW_ITEMS", -1):
        case()
    before = run_alone(True)
    try:
        case()
    finally:
        run_alone(before)


# Bytes that must be free: a file of compiled code is shorter.
_LEAST_ROOM = 1 << 20


class Outcome(NamedTuple):
    """Result of a compilation ahead of use.

    Attributes:
        compiled: Files of compiled code that were added.
        kept, kept_bytes: Files of this version on the disk, and their size.
        failed: Code that could not be compiled and why, a sentence each.
    """

    compiled: int
    kept: int
    kept_bytes: int
    seconds: float
    notes: list[str]
    failed: list[str]


def check_folder(folder: Path) -> None:
    """Check that a folder can keep more, and make it if it is not there.

    Raises:
        OSError: there is no room, or no right to write there; the error names the folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(bytes(_LEAST_ROOM))
    except OSError as error:
        error.filename = str(folder)
        raise


def compile_ahead(cases: Sequence[str], capabilities: Iterable[tuple[int, int]] | None, *, on_gpu: bool,
                  jobs: int | None = None) -> Outcome:  # fmt: skip
    """Compile loops and kernels, and keep them in the cache of compiled code.

    Args:
        capabilities: Compute capabilities of GPUs; None or none for the GPUs of this machine.
        jobs: Processes; None for one a core.
    """
    begin, before = time.monotonic(), _weigh()
    targets, notes, failed = _find_targets(capabilities) if on_gpu else ([], [], [])
    kernels = _list_missing(targets) if targets else []
    if targets and not kernels:
        notes.append("the wheel holds the kernels of these GPUs: there is nothing to compile for them")
    work: dict[str, Callable[[], None]] = {f"CPU loops, {name}": partial(run_case, name) for name in cases}
    work |= {f"GPU kernel, {GPU_KERNELS[number].name}": partial(_compile_kernel, number, targets)
             for number in kernels}  # fmt: skip
    with Bar(len(work), "compiling ahead", "part") as bar:
        for name, error in _run(work, jobs or count_cores()):
            if error is not None:
                failed.append(f"{name}: {str(error) or type(error).__name__}")
            bar.update(1)
    if on_gpu and not capabilities:
        failed += _load_all()
    count, num_bytes = _weigh()
    # A driver keeps the code that it makes of PTX elsewhere.
    return Outcome(max(0, count - before[0]), count, num_bytes, round(time.monotonic() - begin, 1), notes, failed)


def _weigh() -> tuple[int, int]:
    """Number and bytes of compiled files of this version."""
    entries = [entry for entry in list_kept() if entry.kind is Kind.kernels]
    files = [file for entry in entries for file in entry.path.rglob("*") if file.suffix in (".nbc", ".ptx")]
    return len(files), sum(file.stat().st_size for file in files)


def _find_targets(capabilities: Iterable[tuple[int, int]] | None) -> tuple[list[tuple[int, int]], list[str], list[str]]:
    """Find the architectures to compile for, remarks, and capabilities for which there is none."""
    given, failed, targets = list(capabilities or ()), [], set()
    if not given and torch.cuda.is_available():
        given = [abilities(index).compute_capability for index in range(torch.cuda.device_count())]
    if not given:
        return [], ["no kernels of GPUs: there is no GPU here; --arch 9.0 compiles for one that is elsewhere"], []
    for capability in given:
        try:
            targets.add(nearest_target(capability))
        except DeviceError as error:
            failed.append(str(error).replace("device", "--arch", 1))
    return sorted(targets), [], failed


def _import_kernels() -> None:
    """Have all kernels declare themselves."""
    for module in pkgutil.walk_packages(pyg_direct.kernels.__path__, "pyg_direct.kernels."):
        importlib.import_module(module.name)


def _list_missing(targets: Sequence[tuple[int, int]]) -> list[int]:
    """Numbers of the kernels that the wheel does not hold for all of these architectures."""
    _import_kernels()

    def is_shipped(kernel: GpuKernel) -> bool:
        return all(find_shipped(kernel.file_name(target, choice)) is not None
                   for target in targets for choice in kernel.specialisations())  # fmt: skip

    return [number for number, kernel in enumerate(GPU_KERNELS) if not is_shipped(kernel)]


def _compile_kernel(number: int, targets: Sequence[tuple[int, int]]) -> None:
    """Compile all specialisations of a kernel."""
    _import_kernels()
    kernel = GPU_KERNELS[number]
    for choice in kernel.specialisations():
        kernel.compile_all(targets, choice)


def _load_all() -> list[str]:
    """Have the drivers of this machine's GPUs make machine code of all kernels, which they keep; list failures."""
    failed = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        for kernel in GPU_KERNELS:
            for choice in kernel.specialisations():
                try:
                    load_function(kernel.compile(abilities(index).compute_capability, choice), index)
                except (RuntimeError, ImportError) as error:
                    failed.append(f"GPU kernel, {kernel.name}, on GPU {index}: {error}")
    return failed


def _run(work: dict[str, Callable[[], None]], jobs: int) -> Iterator[tuple[str, Exception | None]]:
    """Run all in so many processes; yield the name of each as it ends, and its error."""
    if min(jobs, len(work)) <= 1:
        for name, call in work.items():
            yield name, _try(call)
        return
    with _one_thread_each():
        # A forked process has no threads of CPU loops.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(jobs, len(work)), mp_context=context) as pool:
            running = {pool.submit(_try, call): name for name, call in work.items()}
            for done in as_completed(running):
                yield running[done], done.exception() or done.result()  # type: ignore[misc]


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Let processes that are started have one thread of torch's, as they share the cores."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _try(call: Callable[[], None]) -> Exception | None:
    """Return the error that a call raises, if any."""
    try:
        with warnings.catch_warnings():
            # Of small graphs, to a program that nobody wrote.
            warnings.simplefilter("ignore")
            call()
    except Exception as error:
        # Others may not come through a pipe.
        return RuntimeError(f"{type(error).__name__}: {error}")
    return None
