"""R-GAT of MLPerf Training over a graph of IGBH's shape: training steps with our loader, beside PyG's kernels."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from itertools import islice, repeat
from statistics import mean, median, stdev
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import HeteroData
from torch_geometric.nn import GATConv, HeteroConv
from torch_geometric.utils import trim_to_layer

from pyg_direct.bench.limits import device_copy_rate, time_on_gpu
from pyg_direct.bench.loader import run_steps, without_end
from pyg_direct.bench.result_row import Row
from pyg_direct.datasets.igbh import synthetic_igbh
from pyg_direct.loader.neighbor_loader import NeighborLoader
from pyg_direct.nn.accelerate import accelerate

FANOUTS = [15, 10, 5]
_HIDDEN, _HEADS = 512, 4
_GB = 1 << 30


class RGAT(torch.nn.Module):
    """Layers of a GATConv for each relation, and a matrix; each layer computes nodes that the next one reads."""

    def __init__(self, data: HeteroData, num_classes: int, hidden: int = _HIDDEN, layers: int = len(FANOUTS)) -> None:
        super().__init__()
        widths = {kind: data[kind].x.shape[1] for kind in data.node_types}
        self.layers = torch.nn.ModuleList()
        for _ in range(layers):
            self.layers.append(HeteroConv({
                kind: GATConv((widths[kind[0]], widths[kind[-1]]), hidden // _HEADS, _HEADS, add_self_loops=False)
                for kind in data.edge_types}))  # fmt: skip
            widths = dict.fromkeys(widths, hidden)
        self.last = torch.nn.Linear(hidden, num_classes)

    def forward(self, batch: HeteroData, node_type: str = "paper") -> Tensor:
        """Compute scores of classes of the seeds, `[B, C]`."""
        x, edges = batch.x_dict, batch.edge_index_dict
        for number, layer in enumerate(self.layers):
            x, edges, _ = trim_to_layer(number, batch.num_sampled_nodes_dict, batch.num_sampled_edges_dict, x, edges)
            x = layer({kind: rows.relu() for kind, rows in x.items()} if number else x, edges)
        out: Tensor = self.last(x[node_type][: batch[node_type].batch_size].relu())
        return out


def make_step(model: torch.nn.Module) -> Callable[[HeteroData], None]:
    """Make a training step in bfloat16 by autocast."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=next(model.parameters()).is_cuda)

    def step(batch: HeteroData) -> None:
        optimizer.zero_grad(set_to_none=True)
        store = batch["paper"]
        with torch.autocast(store.x.device.type, torch.bfloat16):
            loss = F.cross_entropy(model(batch), store.y[: store.batch_size])
        loss.backward()
        optimizer.step()

    return step


def count_batch(batch: HeteroData) -> tuple[int, int]:
    """Return nodes and edges of a batch."""
    return sum(len(store.x) for store in batch.node_stores), sum(s.edge_index.shape[1] for s in batch.edge_stores)


def count_work(batch: HeteroData, hidden: int = _HIDDEN, layers: int = len(FANOUTS)) -> tuple[int, int]:
    """Return operations of the products of a training step on a batch, and bytes that it moves at least.

    Each relation multiplies its sources once in a layer, forward, and once more for the gradient of its matrix; layers
    after the first also for the gradient of their rows. Rows are 16 bits wide, and sums fp32. Forward reads the rows
    of sources, writes and reads their products, and writes the sums. Backward reads gradients of sums, products and
    rows, and writes and reads gradients of products; layers after the first also write gradients of rows.
    """
    operations = num_bytes = 0
    x, edges = batch.x_dict, batch.edge_index_dict
    width = batch["paper"].x.shape[1]
    for number in range(layers):
        x, edges, _ = trim_to_layer(number, batch.num_sampled_nodes_dict, batch.num_sampled_edges_dict, x, edges)
        read: dict[str, list[Tensor]] = {}
        made = 0
        reached: dict[str, int] = {}
        for (source, _, target), ends in edges.items():
            if ends.shape[1]:
                read.setdefault(source, []).append(ends[0].unique())
                made += len(read[source][-1])
                reached[target] = max(reached.get(target, 0), int(ends[1].max()) + 1)
        targets = sum(reached.values())
        rows = sum(len(torch.cat(parts).unique()) for parts in read.values())
        operations += (2 if number == 0 else 3) * 2 * made * width * hidden
        num_bytes += 2 * (2 * rows * width) + 2 * (5 * made * hidden) + 4 * (2 * targets * hidden)
        num_bytes += 0 if number == 0 else 4 * rows * width
        width = hidden
    return operations, num_bytes


def find_limit(batch: HeteroData, hidden: int = _HIDDEN) -> tuple[float, float]:
    """Return seconds that a step on a batch takes at least: for its products at the measured rate of bfloat16, and for
    its bytes at the measured rate of copies; see `count_work`.
    """
    width = batch["paper"].x.shape[1]
    operations, num_bytes = count_work(batch, hidden)
    a, b = (torch.randn(8192, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    rate = 2 * 8192 * 8192 * width / median(time_on_gpu(lambda: a @ b.t()))
    return operations / rate, num_bytes / device_copy_rate()


def measure_rgat(scale: float, name: str, *, sizes: tuple[int, ...] = (512, 1024, 2048), batches: int = 60,
                 plain_sizes: tuple[int, ...] = (512,), warm_up: int = 40) -> Iterator[Row]:  # fmt: skip
    """Measure training steps with our loader, and the memory beyond the graph, its rows and the models.

    Args:
        scale: Factor on IGBH-Full.
        name: Name of the graph.
        sizes: Seeds of a batch.
        batches: Steps measured for each way.
        plain_sizes: Sizes for which PyG's kernels are measured too.
        warm_up: Steps before these, in which passes are recorded.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    num_features, num_classes = (1024, 2983) if device == "cuda" else (32, 19)
    data = synthetic_igbh(scale, device=device, dtype=torch.bfloat16, num_features=num_features,
                          num_classes=num_classes)  # fmt: skip
    model = RGAT(data, num_classes, _HIDDEN if device == "cuda" else 32).to(device)
    for size in sizes:
        seeds = data["paper"].train_idx
        size = min(size, len(seeds))
        loader = NeighborLoader(data, FANOUTS, ("paper", seeds), batch_size=size, shuffle=True, drop_last=True, seed=0,
                                placement="auto" if device == "cpu" else "cuda")  # fmt: skip
        first = next(iter(loader))
        case = f"models/{name}/R-GAT step, {size} seeds"
        num_nodes, num_edges = count_batch(first)
        yield Row.of(case, "nodes a seed", "", [num_nodes / size])
        yield Row.of(case, "edges a seed", "", [num_edges / size])
        limits = find_limit(first) if device == "cuda" else (0.0, 0.0)
        for way in ("PyG's kernels", "accelerated") if size in plain_sizes else ("accelerated",):
            # Models and their recordings refer to each other, so that only the collector frees those of the last turn.
            gc.collect()
            fast = copy.deepcopy(model)
            held = torch.cuda.memory_allocated() if device == "cuda" else 0
            if way == "accelerated":
                # Passes are recorded and replayed, as by default.
                accelerate(fast)
            step = make_step(fast)
            run_steps(without_end(loader), step, warm_up, 2)
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            alone = run_steps(repeat(first), step, batches)
            times = run_steps(without_end(loader), step, batches)
            yield Row.of(case, way, "k seeds/s", [size / ms for ms in times], size / 1e3 / max(sum(limits), 1e-9),
                         "products and bytes of all layers")  # fmt: skip
            yield Row.of(case, f"{way}, one batch", "ms", alone)
            if device == "cuda":
                yield Row.of(case, f"{way}, peak memory", "GiB", [(torch.cuda.max_memory_allocated() - held) / _GB])
            del fast, step


def measure_rgat_on_host(scale: float, name: str, *, size: int = 1024, batches: int = 60, warm_up: int = 40,
                         cache: str = "20%") -> Iterator[Row]:  # fmt: skip
    """Measure training steps over fp8 rows in GPU memory, and in host memory with the hottest of them in GPU memory.

    The GPU holds the graph and its rows first, and the host then holds the rows.

    Args:
        scale: Factor on IGBH-Full.
        name: Name of the graph.
        size: Seeds of a batch.
        batches: Steps measured for each way.
        warm_up: Steps before these, in which passes are recorded.
        cache: Share of the rows that GPU memory holds.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    num_features, num_classes, hidden = (1024, 2983, _HIDDEN) if device == "cuda" else (32, 19, 32)
    data = synthetic_igbh(scale, device=device, dtype=torch.float8_e4m3fn, num_features=num_features,
                          num_classes=num_classes)  # fmt: skip
    model = RGAT(data, num_classes, hidden)
    seeds = data["paper"].train_idx.cpu()
    size = min(size, len(seeds))
    case = f"models/{name}/R-GAT, fp8 rows, {size} seeds"
    medians = []
    ways: dict[str, dict[str, Any]] = {
        "rows in GPU memory": {"placement": "cuda"},
        f"rows in host memory, {cache} cached": {"placement": "unified", "topology_placement": "cuda",
                                                 "feature_cache": cache},
    }  # fmt: skip
    for way, options in ways.items():
        if options["placement"] == "unified":
            data = data.to("cpu")
            if device == "cuda":
                torch.cuda.empty_cache()
        loader = NeighborLoader(data, FANOUTS, ("paper", seeds), batch_size=size, shuffle=True, drop_last=True, seed=0,
                                **(options if device == "cuda" else {}))  # fmt: skip
        fast = copy.deepcopy(model).to(device)
        accelerate(fast)
        step = make_step(fast)
        run_steps(without_end(loader), step, warm_up, 2)
        times = run_steps(without_end(loader), step, batches)
        yield Row.of(case, way, "k seeds/s", [size / ms for ms in times])
        medians.append(median(times))
        del loader, fast, step
        gc.collect()
    yield Row.of(case, "rows in host memory over rows in GPU memory, seeds/s", "x", [medians[0] / medians[1]])


def measure_rgat_accuracy(scale: float, name: str, *, seeds: int = 3, batches: int = 150, size: int = 512,
                          num_classes: int = 19, feature_signal: float = 1.5) -> Iterator[Row]:  # fmt: skip
    """Measure validation accuracy after so many steps, accelerated and with PyG's kernels, in percent.

    Args:
        scale: Factor on IGBH-Full.
        name: Name of the graph.
        seeds: Runs of each way; run s of both starts from the same weights and takes the same batches.
        batches: Steps of a run.
        size: Seeds of a batch.
        num_classes, feature_signal: Of the graph; its rows alone do not tell the classes.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    num_features, hidden = (1024, _HIDDEN) if device == "cuda" else (64, 64)
    data = synthetic_igbh(scale, device=device, dtype=torch.bfloat16, num_features=num_features,
                          num_classes=num_classes, feature_signal=feature_signal)  # fmt: skip
    store = data["paper"]
    known = torch.cat([store.val_idx, store.train_idx]).cpu()
    size = min(size, len(known) // 16)
    # A small graph has few nodes for validation: some for training are left out of it.
    validated, train = known[: 8 * size], known[8 * size :]
    options: dict[str, Any] = {"placement": "cuda"} if device == "cuda" else {}

    def open_loader(nodes: Tensor, seed: int, **more: Any) -> NeighborLoader:
        # A new one has the same first epoch.
        return NeighborLoader(data, FANOUTS, ("paper", nodes), batch_size=size, seed=seed, **options, **more)

    scores: dict[str, list[float]] = {"PyG's kernels": [], "accelerated": []}
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = RGAT(data, num_classes, hidden).to(device)
        for way, found in scores.items():
            own = copy.deepcopy(model)
            if way == "accelerated":
                accelerate(own)
            step = make_step(own)
            for batch in islice(without_end(open_loader(train, seed, shuffle=True, drop_last=True)), batches):
                step(batch)
            found.append(100 * _score(own, open_loader(validated, 0)))
            del own, step
    for way, found in scores.items():
        yield Row.of(f"models/{name}/R-GAT, {batches} steps of {size} seeds", f"accuracy, {way}", "%", found,
                     mean(scores["PyG's kernels"]), "mean of PyG's kernels",
                     f"mean {mean(found):.2f}, standard error {_find_error(found):.2f}; "
                     f"runs {', '.join(f'{score:.2f}' for score in found)}")  # fmt: skip


def _score(model: torch.nn.Module, loader: NeighborLoader) -> float:
    """Return the share of seeds whose class is predicted."""
    right = count = 0
    model.eval()
    with torch.no_grad():
        for batch in loader:
            store = batch["paper"]
            with torch.autocast(store.x.device.type, torch.bfloat16):
                found = model(batch).argmax(1)
            right += int((found == store.y[: store.batch_size]).sum())
            count += store.batch_size
    return right / count


def _find_error(values: list[float]) -> float:
    """Return the standard error of a mean."""
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
