"""Layer-wise inference with features and other rows on the host or in files, beside the link and PyG's loader."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader as PygNeighborLoader
from torch_geometric.nn import GraphSAGE
from torch_geometric.typing import WITH_PYG_LIB

from pyg_direct.bench.beside import OURS
from pyg_direct.bench.limits import pinned_copy_rate, time_on_clock
from pyg_direct.bench.result_row import Row
from pyg_direct.datasets import synthetic_graph
from pyg_direct.features.feature import Feature
from pyg_direct.features.row_files import save_rows
from pyg_direct.loader.inference import infer, inference_loader
from pyg_direct.runtime.cuda.device import resolve_device

_LAYERS = 3


def inference(scale: float) -> Iterator[Row]:
    """Measure a model's output for all nodes, layer by layer, with rows on the host and in files."""
    graph = synthetic_graph("products", scale=scale / 5, device=resolve_device(None)).to("cpu")
    workers = 8 if torch.cuda.is_available() else 0
    yield from measure_inference(graph.to_data(), graph.num_classes, f"products x {scale / 5:g}", workers)


def measure_inference(data: Data, num_classes: int, name: str, workers: int, hidden: int = 256, repeats: int = 3,
                      batch_size: int = 4096) -> Iterator[Row]:  # fmt: skip
    """Measure seconds of a pass of GraphSAGE over all nodes and all their neighbors.

    The limit of rows on the host is the longer of two times. One is their bytes, read and written, at the rate of a
    copy over the link. The other is the same pass with all data in GPU memory.

    Args:
        data: A graph on the host.
        num_classes: Width of the result.
        name: Name of the graph.
        workers: Workers of PyG's loader, which makes one pass.
        batch_size: Nodes per batch of PyG's loader.
    """
    device = resolve_device(None)
    # Workers of PyG's loader are forked, and could not read unified memory.
    theirs = data.clone() if WITH_PYG_LIB else None
    model = GraphSAGE(data.num_features, hidden, _LAYERS, num_classes).to(device).eval()
    case = f"inference/{name}/{_LAYERS} layers"
    limit = None
    if device.type == "cuda":
        inside = time_on_clock(partial(infer, model, data, placement="cuda"), repeats, 1)
        yield Row.of(case, f"{OURS}, all in GPU memory", "s", inside)
        crossing = _count_bytes(data, hidden, num_classes) / pinned_copy_rate()
        yield Row.of(case, "rows over the link", "s", [crossing], note="their bytes over the rate of a copy")
        limit = max(crossing, median(inside))
    where = "unified" if device.type == "cuda" else "cpu"
    own = time_on_clock(partial(infer, model, data, placement=where), repeats, 1)
    yield Row.of(case, f"{OURS}, rows on the host", "s", own, limit, "the longer of link and all in GPU memory",
                 note="features copied to unified memory included" if where == "unified" else "")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        x = Feature().from_file(save_rows(Path(folder, "x.safetensors"), data.x))
        in_files = partial(infer, model, data, x=x, out=Path(folder, "out.safetensors"))
        yield Row.of(case, f"{OURS}, rows in files", "s", time_on_clock(in_files, repeats, 1), median(own),
                     "rows on the host", note="as the system caches files")  # fmt: skip
    if theirs is None:
        return
    peer = PygNeighborLoader(theirs, [-1], batch_size=batch_size, num_workers=workers, shuffle=False,
                            persistent_workers=workers > 0)  # fmt: skip
    with torch.no_grad():
        (seconds,) = time_on_clock(partial(model.inference, peer, device), 1, 0)
    yield Row.of(case, f"PyG's inference, pyg-lib, {workers} workers", "s", [seconds],
                 note=f"one pass, {batch_size} nodes a batch")  # fmt: skip
    yield Row.of(case, f"{OURS}, rows on the host, over PyG's inference", "x", [seconds / one for one in own])


def _count_bytes(data: Data, hidden: int, num_classes: int) -> int:
    """Count bytes of float32 rows that layers read and write, each batch's rows once."""
    widths: list[Any] = [data.num_features, *[hidden] * (_LAYERS - 1), num_classes]
    read = sum(batch.n_id.numel() for batch in inference_loader(data))
    return 4 * (read * sum(widths[:-1]) + int(data.num_nodes or 0) * sum(widths[1:]))
