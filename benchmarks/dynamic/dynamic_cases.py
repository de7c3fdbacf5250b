"""Benchmark cases of dynamic graphs: each yields rows of this machine, at a factor of its graphs' sizes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch_geometric.data import Data

from benchmarks.dynamic.delta import measure_delta, measure_unchanged_rows
from benchmarks.dynamic.epochs import mean_ratios, measure_dynamic_epochs
from benchmarks.dynamic.gated import measure_gated_steps
from benchmarks.dynamic.losses import measure_losses
from benchmarks.dynamic.memory_caps import CAPS, measure_dynamic_memory
from benchmarks.dynamic.snapshots import measure_snapshots
from benchmarks.dynamic.sweeps import check_forms, measure_overlap_sweep, measure_reads, measure_slices
from benchmarks.dynamic.tuner import measure_tuner
from benchmarks.dynamic.ways import WAYS
from pyg_direct.bench.result_row import Row
from pyg_direct.datasets.dynamic_graphs import PRESETS, DynamicShape, load_temporal, synthetic_dtdg
from pyg_direct.runtime.cuda.device import resolve_device


def snapshots(scale: float) -> Iterator[Row]:
    """Measure several snapshots aggregated at once, with all edges shared from step to step, or nine in ten.

    Narrow ones are measured in larger groups too, as the choice of groups allows.
    """
    for name, shape in PRESETS.items():
        small = shape._replace(num_nodes=int(shape.num_nodes * scale), num_edges=int(shape.num_edges * scale))
        for change in (0.0, shape.change):
            yield from measure_snapshots(small._replace(change=change), name)
            yield from measure_snapshots(small._replace(change=change), name, 8, (2,), scattered=False, backward=False)


def sweeps(scale: float) -> Iterator[Row]:
    """Measure figures 9, 11 and 12 of PiPAD: sweeps of overlap, snapshots at once and width; Fig. 11 by counting."""
    if not torch.cuda.is_available():
        scale /= 100
    shapes = {name: shape._replace(num_nodes=int(shape.num_nodes * scale), num_edges=int(shape.num_edges * scale))
              for name, shape in PRESETS.items()}  # fmt: skip
    first = next(iter(shapes))
    check_forms(shapes[first])
    yield from measure_overlap_sweep(shapes[first], first)
    yield from measure_slices(shapes)
    for name, shape in PRESETS.items():
        # Shares of reads hardly depend on the size: they differ by 2 % at most from four times the size.
        small = shape._replace(num_nodes=shape.num_nodes // 200, num_edges=shape.num_edges // 200)
        yield from measure_reads(small, name)


def dynamic(scale: float) -> Iterator[Row]:
    """Measure epochs of dynamic graph networks, on files of PYG_DIRECT_DATA and on generated graphs, named as such.

    Only the first snapshots of each graph, the last ones of papers: PyTorch Geometric Temporal would take many minutes
    for all. On a CPU only small graphs, without ways that differ only in transfers or launches.
    """
    device = resolve_device(None).type
    sets = _read_dynamic()
    for nodes in (int(1_000 * scale), int(20_000 * scale))[: 2 if device == "cuda" else 1]:
        sets[f"generated {nodes}"] = synthetic_dtdg(nodes, 10 * nodes, 12, 0.1, weighted=True)
    sets = {name: signal[:12] for name, signal in sets.items()}
    if device == "cuda":
        sets |= {name: signal[-10:] for name, signal in _read_dynamic("graph.npz").items()}
    ways = [way for way in WAYS if "compile" not in way] if device == "cuda" else ["PyGT"]
    rows = []
    for name, signal in sets.items():
        for row in measure_dynamic_epochs({name: signal}, ways=ways, device=device):
            rows.append(row)
            yield row
        # Over the sets so far, for interrupted runs.
        yield from mean_ratios(rows)


def dynamic_compiled(scale: float) -> Iterator[Row]:
    """Measure the same beside `torch.compile`, which takes a minute per model and graph, on two graphs."""
    sets = {name: signal for name, signal in _read_dynamic().items() if name in ("england_covid", "as733")}
    sets = sets or {"generated 1000": synthetic_dtdg(1000, int(10_000 * scale), 20, 0.1, weighted=True)}
    yield from measure_dynamic_epochs(sets, ways=[way for way in WAYS if way.startswith("resident")],
                                      device=resolve_device(None).type)  # fmt: skip


def dynamic_losses(scale: float) -> Iterator[Row]:
    """Measure the distance of losses of dynamic graph networks to PyTorch Geometric Temporal's; files of
    PYG_DIRECT_DATA.
    """
    yield from measure_losses(_read_dynamic(), device=resolve_device(None).type)


def dynamic_delta(scale: float) -> Iterator[Row]:
    """Measure the overlap of consecutive snapshots: bytes saved by sending changes, and unchanged rows."""
    for name, shape in PRESETS.items():
        nodes, edges = int(shape.num_nodes * scale), int(shape.num_edges * scale)
        yield from measure_delta(shape._replace(num_nodes=nodes, num_edges=edges), f"{name} x {scale:g}")
    yield from measure_unchanged_rows(_read_dynamic() | _read_dynamic("graph.npz"))


def dynamic_tuner(scale: float) -> Iterator[Row]:
    """Measure the choice of groups beside exhaustive search; files of PYG_DIRECT_DATA, and generated graphs."""
    sets = _read_dynamic()
    nodes, edges = int(50_000 * scale), int(500_000 * scale)
    for change in (0.0, 0.02, 0.1, 0.2, 0.5, 1.0):
        sets[f"generated, {change:.0%} change"] = synthetic_dtdg(nodes, edges, 8, change)
    sets["generated, 10% change, weights"] = synthetic_dtdg(nodes, edges, 8, 0.1, weighted=True)
    # On these small graphs the host's launches take nearly as long as the GPU's work.
    for nodes in (int(50_000 * scale) // 50, int(50_000 * scale) // 10):
        for change in (0.02, 0.1, 0.5):
            name = f"generated, {nodes} nodes, {change:.0%} change"
            sets[name] = synthetic_dtdg(max(1, nodes), max(1, 10 * nodes), 8, change)
    yield from measure_tuner(sets, device=resolve_device(None).type)


def dynamic_memory(scale: float) -> Iterator[Row]:
    """Measure epochs of dynamic graph networks under caps on GPU memory; with a GPU, on graphs of published shapes.

    These are a twentieth as large, as all of their structures are made three times on the host. One has more snapshots
    than the others, as frames of eight cover most of ten. It also has a cap below the rows that models of one layer
    read.
    """
    if torch.cuda.is_available():
        sets = {name: signal[-10:] for name, signal in _read_dynamic("graph.npz").items()}
        shapes = [(name, shape, 10) for name, shape in PRESETS.items()]
        for name, shape, count in [*shapes, (*next(iter(PRESETS.items())), 24)]:
            nodes, edges = int(shape.num_nodes * scale / 20), int(shape.num_edges * scale / 20)
            more = "" if count == 10 else f", {count} snapshots"
            sets[f"generated, {name} / {20 / scale:g}{more}"] = synthetic_dtdg(nodes, edges, count, shape.change)
        longest = sets.popitem()
        yield from measure_dynamic_memory(sets)
        yield from measure_dynamic_memory(dict([longest]), caps=("2%", *CAPS))
    else:
        yield from measure_dynamic_memory(_read_dynamic(), device="cpu")


def dynamic_large(scale: float) -> Iterator[Row]:
    """Measure epochs of dynamic graph networks on graphs of published sizes, under caps on GPU memory.

    On a CPU the graphs are a hundredth as large.
    """
    device = resolve_device(None).type
    scale = scale if device == "cuda" else scale / 100
    ways = ("PyGT", "PyGT-A", "PyGT-R", "PyGT-G", "resident PyGT")
    for name, shape in _scale_presets(scale):
        sets = {f"generated, {name}": synthetic_dtdg(shape.num_nodes, shape.num_edges, 10, shape.change)}
        # Half the width of other cases: the memory that a frame keeps for backward grows with it, in PyGT the most.
        yield from measure_dynamic_memory(sets, ways=ways if device == "cuda" else ways[:1], hidden=16, device=device)


def gated(scale: float) -> Iterator[Row]:
    """Measure steps of T-GCN with the numbers of nodes of published graphs; on a CPU with a hundredth."""
    device = resolve_device(None).type
    scale = scale if device == "cuda" else scale / 100
    for name, shape in _scale_presets(scale):
        for channels in (16, 32, 64):
            yield from measure_gated_steps(shape.num_nodes, name, channels, device=device)


def _scale_presets(scale: float) -> Iterator[tuple[str, DynamicShape]]:
    """Iterate over graphs of published sizes times `scale`, which their names contain."""
    for name, shape in PRESETS.items():
        nodes, edges = max(1, int(shape.num_nodes * scale)), max(1, int(shape.num_edges * scale))
        yield name if scale == 1 else f"{name} x {scale:g}", shape._replace(num_nodes=nodes, num_edges=edges)


_NAMES = {"graph.npz": "papers by year", "snapshots.npz": "as733"}


def _read_dynamic(*names: str) -> dict[str, list[Data]]:
    """Read dynamic graphs of PYG_DIRECT_DATA, or those in files of these names: papers are slow on a CPU."""
    folder = os.environ.get("PYG_DIRECT_DATA")
    if not folder:
        return {}
    names = names or ("england_covid.json", "twitter_tennis_*.json", "chickenpox.json", "snapshots.npz")
    files = (file for name in names for file in sorted(Path(folder).glob(f"**/{name}")))
    return {_NAMES.get(file.name, file.stem): load_temporal(file) for file in files}


DYNAMIC_CASES: dict[str, Callable[[float], Iterator[Row]]] = {
    "snapshots": snapshots,
    "sweeps": sweeps,
    "dynamic": dynamic,
    "dynamic_compiled": dynamic_compiled,
    "dynamic_delta": dynamic_delta,
    "dynamic_large": dynamic_large,
    "dynamic_losses": dynamic_losses,
    "dynamic_memory": dynamic_memory,
    "dynamic_tuner": dynamic_tuner,
    "gated": gated,
}
