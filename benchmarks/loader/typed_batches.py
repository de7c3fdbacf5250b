"""General sampler: types, times, weights, separate trees, links and many relations; edges a second of each."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import chain, islice, repeat
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import NeighborLoader as PygNeighborLoader
from torch_geometric.typing import WITH_PYG_LIB

from benchmarks.loader.peers import hold_contest
from benchmarks.loader.typed_graphs import LAST_DAY, make_mag, make_relations, make_tables
from pyg_direct.bench.beside import OURS, Contender, rows_of_contest
from pyg_direct.bench.limits import wait_for_gpu
from pyg_direct.bench.result_row import Row
from pyg_direct.compiler.jit import set_cpu_threads
from pyg_direct.graph.hetero_topo import HeteroTopo
from pyg_direct.loader.hgt_loader import HGTLoader
from pyg_direct.loader.link_loader import LinkNeighborLoader
from pyg_direct.loader.neighbor_loader import NeighborLoader
from pyg_direct.loader.prefetch.batch_groups import MOST_BATCHES
from pyg_direct.runtime.cuda.device import resolve_device
from pyg_direct.sampling.hetero_plan import GeneralPlan
from pyg_direct.sampling.sampling_options import GeneralRecipe

WINDOWS = 5


def measure_types(scale: float, batches: int = 20, sizes: tuple[int, ...] = (1024, 8192)) -> Iterator[Row]:
    """Measure sampling around papers of a graph like ogbn-mag: uniform, in trees, by weight, by time, and by LABOR."""
    device = resolve_device(None)
    data = make_mag(scale, device)
    for name, topology, recipe in _open_options(data, device):
        plan = GeneralPlan(topology.place(device=device), recipe)
        for size in sizes:
            seeds = [{"paper": torch.randint(data["paper"].num_nodes, (size,))} for _ in range(batches)]
            yield _rate_row(f"hetero/mag{_scaled(scale)}/{size}", name, plan, seeds)


def measure_types_on_cpu(scale: float, size: int = 1024) -> Iterator[Row]:
    """Measure the same on one thread of a CPU, ours and pyg-lib's."""
    data = make_mag(scale, "cpu")
    batches = [torch.randperm(int(data["paper"].num_nodes))[:size] for _ in range(10)] * 5
    before, torch_before = set_cpu_threads(1), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name, topology, recipe in _open_options(data, torch.device("cpu")):
            plan = GeneralPlan(topology.place(device="cpu"), recipe)
            contenders = [Contender(f"{OURS}, 1 thread", partial(_sample_each, plan), "with e_id")]
            if WITH_PYG_LIB and recipe.sampling == "uniform":
                contenders.append(Contender("pyg-lib, 1 thread", _open_pyg_lib(topology, recipe), "with e_id"))
            hold_contest(contenders, batches, alone=False)
            yield from rows_of_contest(f"hetero/mag{_scaled(scale)}/cpu/{size}/{name}", contenders, "M/s")
    finally:
        set_cpu_threads(before)
        torch.set_num_threads(torch_before)


def _open_options(data: HeteroData, device: torch.device) -> Iterator[tuple[str, HeteroTopo, GeneralRecipe]]:
    """Open (name, graph, recipe) of each way to choose neighbors."""
    num_nodes, edges = dict(data.num_nodes_dict), dict(data.edge_index_dict)
    generator = torch.Generator(device).manual_seed(2)
    weights = {kind: torch.rand(pairs.shape[1], generator=generator, device=device) for kind, pairs in edges.items()}
    times = {kind: torch.randint(1000, (size,), generator=generator, device=device)
             for kind, size in num_nodes.items()}  # fmt: skip
    options: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "uniform": ({}, {}),
        "disjoint": ({}, {"disjoint": True}),
        "weighted": ({"edge_weight": weights}, {}),
        "times": ({"node_time": times}, {}),
        "times, last": ({"node_time": times}, {"temporal_strategy": "last"}),
        "labor": ({}, {"sampling": "labor"}),
        "labor, times": ({"node_time": times}, {"sampling": "labor"}),
    }
    for name, (parts, choices) in options.items():
        yield name, HeteroTopo(num_nodes, edges, **parts), GeneralRecipe([15, 10, 5], **choices)


def _sample_each(plan: GeneralPlan, batches: Sequence[Tensor]) -> int:
    samples = (plan.sample({"paper": seeds}, number) for number, seeds in enumerate(batches))
    return sum(pairs.shape[1] for sample in samples for pairs in sample.edge_index.values())


def _open_pyg_lib(topo: HeteroTopo, recipe: GeneralRecipe) -> Callable[[Sequence[Tensor]], int]:
    """Open pyg-lib's sampler over the same rows; it samples batches around papers and counts their edges."""
    hetero_neighbor_sample = import_module("pyg_lib").sampler.hetero_neighbor_sample
    indptr, indices, edge_ids, edge_weight = {}, {}, {}, {}
    for number, kind in enumerate(topo.edge_types):
        own = slice(*topo.edge_starts[number : number + 2].tolist())
        rows = slice(int(topo.row_starts[number]), int(topo.row_starts[number + 1]) + 1)
        indptr[kind] = topo.indptr[rows] - own.start
        indices[kind] = topo.indices[own].long() - int(topo.type_starts[topo.reached[number]])
        edge_ids[kind], edge_weight[kind] = topo.edge_ids[own].long(), topo.edge_weight[own]
    node_time = {kind: topo.node_time[start : start + topo.num_nodes[kind]].clone()
                 for kind, start in zip(topo.node_types, topo.type_starts.tolist(), strict=False)}  # fmt: skip
    options = {"node_time_dict": node_time if topo.is_temporal else None, "csc": True,
               "edge_weight_dict": edge_weight if topo.weighted.any() else None,
               "disjoint": recipe.disjoint or topo.is_temporal,
               "temporal_strategy": recipe.temporal_strategy}  # fmt: skip
    fanouts = {kind: list(recipe.fanouts) for kind in topo.edge_types}

    def run(batches: Sequence[Tensor]) -> int:
        edges = 0
        for seeds in batches:
            found = hetero_neighbor_sample(indptr, indices, {"paper": seeds}, fanouts, **options)[3]
            # As PyG's loader does for unsorted edges.
            edges += sum(edge_ids[kind][places].numel() for kind, places in found.items())
        return edges

    return run


def measure_relations(scale: float, batches: int = 10, size: int = 1000) -> Iterator[Row]:
    """Measure a hundred relations beside one, at equal edges: in the latter a node has ten times the fanout."""
    device = resolve_device(None)
    seconds: dict[int, list[float]] = {}
    for count, fanouts in ((1, [20, 10]), (100, [2, 1])):
        data = make_relations(count, scale, device)
        topology = HeteroTopo(dict(data.num_nodes_dict), dict(data.edge_index_dict)).place(device=device)
        plan = GeneralPlan(topology, GeneralRecipe(fanouts))
        kinds = topology.topo.node_types
        seeds = [{kind: torch.randint(data[kind].num_nodes, (size // len(kinds),)) for kind in kinds}
                 for _ in range(batches)]  # fmt: skip
        edges, times = _time_batches(plan.sample, seeds)
        seconds[count] = [t / e for t, e in zip(times, edges, strict=True)]
        yield Row.of(f"hetero/relations{_scaled(scale)}/{size}", f"{count} relations", _unit(device),
                     [e / t / _scale(device) for t, e in zip(times, edges, strict=True)],
                     note=f"{sum(edges) / len(edges):.0f} edges a batch")  # fmt: skip
        del data, topology, plan
    one = sorted(seconds[1])[batches // 2]
    yield Row.of(f"hetero/relations{_scaled(scale)}/{size}", "100 relations over one, time an edge", "x",
                 [t / one for t in seconds[100]])  # fmt: skip


def measure_times(scale: float, workers: tuple[int, ...], batches: int = 20, size: int = 512) -> Iterator[Row]:
    """Measure batches a second of `NeighborLoader` over tables with times, including features, beside PyG's loader."""
    device = resolve_device(None)
    data = make_tables(scale, device, num_features=64)
    # Enough for an epoch longer than the measurement: PyG's workers restart at its start.
    seeds = torch.randint(data["user"].num_nodes, (300 * size,))
    times = torch.randint(LAST_DAY * 9 // 10, LAST_DAY, (len(seeds),))
    common: dict[str, Any] = {"num_neighbors": [128, 128], "input_nodes": ("user", seeds), "time_attr": "time",
                              "input_time": times, "batch_size": size, "shuffle": True, "drop_last": True}  # fmt: skip
    case = f"hetero/tables{_scaled(scale)}/{size}"
    # One by one, up to a loader's largest group in one call, and in a loader's own groups; on a CPU also one by one on
    # two threads.
    own: dict[str, list[float]] = {}
    for group, prefetch in ((1, 1), *[(1, 2)] * (device.type == "cpu"), (16, 1), (None, 1)):
        ours = NeighborLoader(data, seed=0, super_batch=group, prefetch=prefetch, **common)
        most = group or MOST_BATCHES
        name = OURS if group is None else f"{OURS}, super_batch={group}{', prefetch=2' if prefetch == 2 else ''}"
        edges, own[name] = _time_loader(ours, -(-batches // most) * most, 3 * most)
        yield Row.of(case, name, "ms", [1e3 * t for t in own[name]], note=f"{edges:.0f} edges a batch")
    if not WITH_PYG_LIB:
        # torch-sparse has no times.
        return
    # PyG's workers are forked: at that time ours must not hold memory that a GPU reads.
    del ours
    on_host = data.cpu()
    best: tuple[list[float], int] | None = None
    for count in workers:
        peer = PygNeighborLoader(on_host, num_workers=count, **common)
        try:
            # Windows of more batches than the workers prefetch.
            edges, seconds = _time_loader(peer, max(2, batches // 4, 3 * count), 3 * count + 2)
        except RuntimeError as error:
            # A worker of PyG's has died.
            warnings.warn(f"PyG's loader with {count} workers: {error}", stacklevel=2)
            continue
        yield Row.of(case, f"PyG's loader, pyg-lib, {count} workers", "ms", [1e3 * t for t in seconds],
                     note=f"{edges:.0f} edges a batch")  # fmt: skip
        if best is None or sum(seconds) < sum(best[0]):
            best = seconds, count
    if best is None:
        return
    mean = sum(best[0]) / len(best[0])
    for name, seconds in own.items():
        yield Row.of(case, f"{name} over PyG's loader at its best", "x", [mean / t for t in seconds],
                     note=f"{best[1]} workers, of {', '.join(map(str, workers))}")  # fmt: skip


def measure_links(data: Data, name: str, batches: int = 30, size: int = 1024) -> Iterator[Row]:
    """Measure edges a second of `LinkNeighborLoader` with as many negatives as links, and of `NeighborLoader`.

    A batch of L links has 4 L ends, whose nodes are the seeds: so batches of L and of 4 L nodes are compared.
    """
    common: dict[str, Any] = {"num_neighbors": [15, 10, 5], "shuffle": True, "drop_last": True, "seed": 0}
    device = resolve_device(None)
    links = data.edge_index[:, torch.randperm(data.edge_index.shape[1])[: 200 * size]]
    loaders = {
        f"NeighborLoader, {size} nodes": NeighborLoader(data, batch_size=size, **common),
        f"NeighborLoader, {4 * size} nodes": NeighborLoader(data, batch_size=4 * size, **common),
        f"LinkNeighborLoader, {size} links": LinkNeighborLoader(data, edge_label_index=links, neg_sampling="binary",
                                                                batch_size=size, **common),
    }  # fmt: skip
    rates = {}
    for kind, loader in loaders.items():
        edges, seconds = _time_loader(loader, batches, 5)
        rates[kind] = [edges / t / _scale(device) for t in seconds]
        yield Row.of(f"hetero/links/{name}/{size}", kind, _unit(device), rates[kind],
                     note=f"{edges:.0f} edges a batch, no features")  # fmt: skip
    *nodes, own = rates
    for kind in nodes:
        middle = median(rates[kind])
        yield Row.of(f"hetero/links/{name}/{size}", f"LinkNeighborLoader over {kind}", "x",
                     [rate / middle for rate in rates[own]])  # fmt: skip


def measure_typed_links(scale: float, batches: int = 30, size: int = 1024) -> Iterator[Row]:
    """Measure edges a second of `LinkNeighborLoader` around authors and papers of a graph like ogbn-mag.

    It has as many negatives as links, and is compared with `NeighborLoader` around as many papers as there are ends.
    Measured with and without times, and without the edges of the links.
    """
    device = resolve_device(None)
    data = make_mag(scale, device)
    generator = torch.Generator(device).manual_seed(2)
    for store in data.node_stores:
        store.time = torch.randint(1000, (store.num_nodes,), generator=generator, device=device)
    kind = "author", "writes", "paper"
    chosen = torch.randperm(data[kind].edge_index.shape[1], device=device)[: 100 * size]
    links = data[kind].edge_index[:, chosen].cpu()
    nodes = torch.randint(int(data["paper"].num_nodes), (400 * size,))
    common: dict[str, Any] = {"num_neighbors": [15, 10, 5], "shuffle": True, "drop_last": True, "seed": 0}
    case = f"hetero/mag{_scaled(scale)}/links/{size}"
    for name in ("uniform", "times", "exclude_target_edges"):
        own, excludes = dict(common), name == "exclude_target_edges"
        times: list[Tensor | None] = [None, None]
        if name == "times":
            own["time_attr"] = "time"
            times = [torch.randint(500, 1000, (count,)) for count in (len(nodes), links.shape[1])]
        loaders = {
            f"NeighborLoader, {4 * size} nodes": NeighborLoader(data, input_nodes=("paper", nodes), input_time=times[0],
                                                                batch_size=4 * size, **own),
            f"LinkNeighborLoader, {size} links": LinkNeighborLoader(data, edge_label_index=(kind, links),
                                                                    edge_label_time=times[1], batch_size=size,
                                                                    neg_sampling="binary", **own,
                                                                    exclude_target_edges=excludes),
        }  # fmt: skip
        rates = []
        for metric, loader in loaders.items():
            edges, seconds = _time_loader(loader, batches, 5)
            rates.append([edges / t / _scale(device) for t in seconds])
            yield Row.of(case, f"{metric}, {name}", _unit(device), rates[-1],
                         note=f"{edges:.0f} edges a batch, no features")  # fmt: skip
        middle = median(rates[0])
        yield Row.of(case, f"LinkNeighborLoader over NeighborLoader, {name}", "x",
                     [rate / middle for rate in rates[1]])  # fmt: skip


def measure_hgt(scale: float, batches: int = 10, size: int = 1024) -> Iterator[Row]:
    """Measure batches of `HGTLoader` around papers of a graph like ogbn-mag; on a GPU beside the host's CPU.

    PyG's class needs torch-sparse.
    """
    device = resolve_device(None)
    data = make_mag(scale, device)
    papers = torch.randint(int(data["paper"].num_nodes), (40 * size,))
    case, times = f"hetero/mag{_scaled(scale)}/hgt/{size}", {}
    for place in dict.fromkeys((device.type, "cpu")):
        loader = HGTLoader(data.to(place), [512] * 4, ("paper", papers), batch_size=size, shuffle=True, drop_last=True,
                           seed=0, device=place)  # fmt: skip
        edges, times[place] = _time_loader(loader, batches, 3)
        metric = OURS if place == device.type else f"{OURS}, the CPU"
        yield Row.of(case, metric, "ms", [1e3 * t for t in times[place]], note=f"{edges:.0f} edges a batch")
        del loader
    if device.type != "cpu":
        middle = median(times[device.type])
        yield Row.of(case, "the CPU over the GPU", "x", [t / middle for t in times["cpu"]])


def _rate_row(case: str, metric: str, plan: GeneralPlan, seeds: Sequence[Mapping[str, Tensor]]) -> Row:
    device = plan.topology.device
    edges, seconds = _time_batches(plan.sample, seeds)
    rates = [e / t / _scale(device) for e, t in zip(edges, seconds, strict=True)]
    milliseconds = 1e3 * median(seconds)
    return Row.of(case, metric, _unit(device), rates,
                  note=f"{sum(edges) / len(edges):.0f} edges a batch, {milliseconds:.2f} ms")  # fmt: skip


def _time_batches(sample: Callable[..., Any], seeds: Sequence[Any]) -> tuple[list[int], list[float]]:
    """Measure (edges, seconds) of each batch, one after the other with the GPU idle between."""
    edges, seconds = [], []
    for number, own in enumerate([*seeds[:3], *seeds]):
        wait_for_gpu()
        begin = time.perf_counter()
        made = sample(own, number)
        wait_for_gpu()
        if number >= 3:
            seconds.append(time.perf_counter() - begin)
            edges.append(sum(pairs.shape[1] for pairs in made.edge_index.values()))
    return edges, seconds


def _time_loader(loader: Any, batches: int, warm_up: int) -> tuple[float, list[float]]:
    """Measure (edges per batch, seconds per batch of each window)."""
    source = chain.from_iterable(repeat(loader))
    edges = [_count_edges(batch) for batch in islice(source, warm_up)]
    seconds = []
    for _ in range(WINDOWS):
        wait_for_gpu()
        begin = time.perf_counter()
        edges += [_count_edges(batch) for batch in islice(source, batches)]
        wait_for_gpu()
        seconds.append((time.perf_counter() - begin) / batches)
    return sum(edges) / len(edges), seconds


def _count_edges(batch: Data | HeteroData) -> int:
    if isinstance(batch, HeteroData):
        # PyG's `edge_index_dict` would take a tenth of the time of a batch.
        return sum(store._mapping["edge_index"].shape[1] for store in batch._edge_store_dict.values())
    return int(batch.edge_index.shape[1])


def _scaled(scale: float) -> str:
    return "" if scale == 1 else f" x {scale:g}"


def _unit(device: torch.device) -> str:
    return "G/s" if device.type == "cuda" else "M/s"


def _scale(device: torch.device) -> float:
    return 1e9 if device.type == "cuda" else 1e6
