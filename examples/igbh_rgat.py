"""Classify papers of a graph in IGBH's shape by the R-GAT of MLPerf Training, and report the time to a target accuracy.

    python examples/igbh_rgat.py --scale 0.015625                                  # a 64th, on one GPU
    torchrun --nproc-per-node=gpu examples/igbh_rgat.py --folder /data/igbh8 --scale 0.125 --dtype float8_e4m3fn
    python examples/igbh_rgat.py --scale 1e-5 --device cpu --target 0.5            # a look at it on a CPU

With `--folder` the graph is written to files once, out of core, and read from there; otherwise it is drawn in memory.
`--rows` says where the rows lie: in GPU memory, divided over GPUs joined by NVLink; in host memory, with hot rows in
GPU memory; or in their files. Several hosts take a folder that all of them see, or hold parts of the graph:

    python examples/igbh_rgat.py --folder /data/igbh --scale 1 --partition /data/parts --write-parts 16
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        examples/igbh_rgat.py --folder /data/igbh --scale 1 --partition /data/parts
"""

import argparse
import gc
import os
import time
import warnings
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import above_zero, at_least_one, parse
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import HeteroData
from torch_geometric.nn import GATConv, HeteroConv
from torch_geometric.utils import trim_to_layer

import pyg_direct
from pyg_direct import Feature, FeatureStore, NeighborLoader
from pyg_direct.datasets import load_igbh, synthetic_igbh, write_igbh
from pyg_direct.distributed import DistGraph, DistNeighborLoader, partition_graph


class RGAT(torch.nn.Module):
    """Layers of a `GATConv` for each relation; a layer has the relations alone whose results a later layer reads."""

    def __init__(self, data: HeteroData, num_classes: int, hidden: int, heads: int, num_layers: int) -> None:
        super().__init__()
        relations: list[list] = []
        read = {"paper"}
        for _ in range(num_layers):
            relations.insert(0, [kind for kind in data.edge_types if kind[2] in read])
            read = read | {kind[0] for kind in relations[0]}
        width = data["paper"].num_features
        self.layers = torch.nn.ModuleList()
        with warnings.catch_warnings():
            # In the last layers some types are read, and not computed anew.
            warnings.filterwarnings("ignore", message="There exist node types")
            for number, kinds in enumerate(relations):
                size = hidden if number else width
                self.layers.append(HeteroConv({
                    kind: GATConv((size, size), hidden // heads, heads, add_self_loops=False) for kind in kinds
                }))  # fmt: skip
        self.last = torch.nn.Linear(hidden, num_classes)

    def forward(self, batch: HeteroData) -> torch.Tensor:
        """Compute scores of the seeds, `[B, C]`."""
        x, edges = batch.x_dict, batch.edge_index_dict
        # Rows come in the precision in which they are stored, which autocast widens where a product first reads them.
        if not torch.is_autocast_enabled(self.last.weight.device.type):
            x = {kind: rows.to(self.last.weight.dtype) for kind, rows in x.items()}
        for number, layer in enumerate(self.layers):
            x, edges, _ = trim_to_layer(number, batch.num_sampled_nodes_dict, batch.num_sampled_edges_dict, x, edges)
            x = {kind: F.relu(rows) for kind, rows in layer(x, edges).items()}
        return self.last(x["paper"][: batch["paper"].batch_size])


def open_graph(args: argparse.Namespace) -> HeteroData:
    """Draw the graph in memory, or open its files, which rank 0 writes if they are missing."""
    options = {"num_features": args.features, "num_classes": args.classes, "dtype": getattr(torch, args.dtype)}
    if args.folder is None:
        return synthetic_igbh(args.scale, seed=args.seed, **options)
    if args.rank == 0:
        write_igbh(args.folder, args.scale, seed=args.seed, threads=args.threads, **options)
    if args.world > 1:
        dist.barrier()
    return load_igbh(args.folder)


def make_loader(graph: HeteroData | DistGraph, data: HeteroData, part: str, args: argparse.Namespace
                ) -> NeighborLoader | DistNeighborLoader:  # fmt: skip
    """Make the loader of "train" or "val"; the processes share its batches."""
    is_train = part == "train"
    seeds = ("paper", data["paper"][f"{part}_idx"].clone())
    options = {"batch_size": args.batch_size, "shuffle": is_train, "seed": args.seed,
               "uneven": "pad" if is_train else "keep"}  # fmt: skip
    if isinstance(graph, DistGraph):
        return DistNeighborLoader(graph, args.fanouts, seeds, **options)
    options |= {"device": args.device, "ranks": "auto"}
    if args.rows == "file":
        store = FeatureStore(args.device)
        for kind in data.node_types:
            file = next((args.folder / kind).glob("x.*"))
            feature = Feature(device_cache_size=args.cache, host_cache_size=args.host_cache, device=args.device)
            store[kind, "x", None] = feature.from_file(file)
        store["paper", "y", None] = data["paper"].y
        return NeighborLoader((store, graph), args.fanouts, seeds, **options)
    if args.on_gpu and args.world > 1:
        policy = "p2p_clique_replicate" if args.rows == "gpu" else "device_replicate"
        options |= {"cache_policy": policy, "feature_cache": args.cache}
    elif args.on_gpu and args.rows == "host":
        options |= {"placement": "unified", "topology_placement": "auto", "feature_cache": args.cache}
    return NeighborLoader(graph, args.fanouts, seeds, **options)


@torch.no_grad()
def evaluate(model: torch.nn.Module, loader: NeighborLoader, args: argparse.Namespace) -> float:
    """Return the share of papers that are classified right, over all processes."""
    model.eval()
    counts = torch.zeros(2, device=args.device)
    for batch in loader:
        with args.amp():
            out = model(batch)
        counts += torch.stack([(out.argmax(1) == batch["paper"].y[: len(out)]).sum(), counts.new_tensor(len(out))])
    if args.world > 1:
        dist.all_reduce(counts)
    model.train()
    return float(counts[0] / counts[1].clamp(min=1))


def train(graph: HeteroData | DistGraph, data: HeteroData, args: argparse.Namespace) -> None:
    """Train until the target accuracy or the last epoch, with evaluations in between."""
    torch.manual_seed(args.seed)
    train_loader, val_loader = (make_loader(graph, data, part, args) for part in ("train", "val"))
    model = RGAT(data, args.classes, args.hidden, args.heads, len(args.fanouts)).to(args.device)
    pyg_direct.accelerate(model)
    parallel = model
    if args.world > 1:
        parallel = DistributedDataParallel(model, [args.device] if args.on_gpu else None)
    optimizer = torch.optim.Adam(parallel.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler(args.device.type, enabled=args.precision == "float16")
    every = max(1, len(train_loader) // args.evaluations)

    begin, trained, num_seeds, sizes, reached = time.perf_counter(), 0.0, 0, [0, 0], None
    for epoch in range(1, args.epochs + 1):
        started, total, count = time.perf_counter(), torch.zeros((), device=args.device), 0
        for step, batch in enumerate(train_loader, 1):
            optimizer.zero_grad(set_to_none=True)
            seeds = batch["paper"].batch_size
            with args.amp():
                loss = F.cross_entropy(parallel(batch), batch["paper"].y[:seeds])
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            total += loss.detach() * seeds
            count += seeds
            sizes[0] += sum(len(store.x) for store in batch.node_stores)
            sizes[1] += sum(store.edge_index.shape[1] for store in batch.edge_stores)
            if step % every == 0 or step == len(train_loader):
                mean = float(total) / count  # waits for the steps before
                trained += time.perf_counter() - started
                num_seeds, accuracy = num_seeds + count, evaluate(model, val_loader, args)
                if args.rank == 0:
                    at = epoch - 1 + step / len(train_loader)
                    print(f"epoch {at:.2f}: loss {mean:.4f}, accuracy {accuracy:.4f}, "
                          f"{time.perf_counter() - begin:.2f} s", flush=True)  # fmt: skip
                if accuracy >= args.target:
                    reached = time.perf_counter() - begin
                    break
                started, total, count = time.perf_counter(), torch.zeros_like(total), 0
        if reached is not None:
            break
    if args.rank == 0:
        print(f"{num_seeds / trained:.0f} seeds/s of each process, {args.world} processes; {sizes[0] / num_seeds:.0f} "
              f"nodes and {sizes[1] / num_seeds:.0f} edges a seed")  # fmt: skip
        print(f"accuracy {args.target} not reached" if reached is None else
              f"accuracy {args.target} reached after {reached:.2f} s")  # fmt: skip


def write_parts(data: HeteroData, args: argparse.Namespace) -> None:
    """Write the graph in parts, one for each process of a later run."""
    rows = {kind: {"x": data[kind].x} for kind in data.node_types}
    rows["paper"]["y"] = data["paper"].y
    partition_graph(args.partition, data.edge_index_dict, args.write_parts, node_rows=rows, progress=True,
                    num_nodes={kind: data[kind].num_nodes for kind in data.node_types})  # fmt: skip


def read_options() -> argparse.Namespace:
    parser = parse(__doc__, epochs=2, batch_size=1024, scale=1 / 1024)
    parser.add_argument("--folder", type=Path, help="files of the graph; written if they are missing")
    parser.add_argument("--threads", type=at_least_one, default=os.cpu_count() or 1, help="threads that write files")
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16", "float8_e4m3fn"],
                        help="of the rows in files and memory")  # fmt: skip
    parser.add_argument("--features", type=at_least_one, default=1024)
    parser.add_argument("--classes", type=at_least_one, default=2983)
    parser.add_argument("--rows", choices=["gpu", "host", "file"], default="gpu", help="memory of the rows")
    parser.add_argument("--cache", default="20%", help="GPU memory for hot rows: a share of them, or 20G")
    parser.add_argument("--host-cache", default="20%", help="with --rows file: host memory for hot rows")
    parser.add_argument("--partition", type=Path, help="folder of a graph in parts, one for each process")
    parser.add_argument("--write-parts", type=at_least_one, help="write that many parts to --partition, and end")
    parser.add_argument("--hidden", type=at_least_one, default=512)
    parser.add_argument("--heads", type=at_least_one, default=4)
    parser.add_argument("--fanouts", type=int, nargs="+", default=[15, 10, 5])
    parser.add_argument("--lr", type=above_zero, default=1e-3)
    parser.add_argument("--precision", choices=["bfloat16", "float16", "float32"], help="bfloat16 on a GPU")
    parser.add_argument("--target", type=above_zero, default=0.72, help="accuracy at which the clock stops")
    parser.add_argument("--evaluations", type=at_least_one, default=20, help="evaluations an epoch")
    args = parser.parse_args()
    if args.folder is None and (args.rows == "file" or args.partition is not None):
        parser.error("--folder must name the files of the graph, with --rows file and with --partition")
    if args.write_parts is not None and args.partition is None:
        parser.error("--partition must name the folder of the parts, with --write-parts")
    return args


def main() -> None:
    args = read_options()
    args.on_gpu = (args.device or ("cuda" if torch.cuda.is_available() else "cpu")) == "cuda"
    args.rank, args.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    args.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if args.on_gpu else torch.device("cpu")
    args.precision = args.precision or ("bfloat16" if args.on_gpu else "float32")
    is_mixed, dtype = args.precision != "float32", getattr(torch, args.precision)
    args.amp = lambda: torch.autocast(args.device.type, dtype) if is_mixed else nullcontext()
    if args.on_gpu:
        torch.cuda.set_device(args.device)
    if "WORLD_SIZE" in os.environ:  # torchrun
        dist.init_process_group("nccl" if args.on_gpu else "gloo")

    data = open_graph(args)
    if args.rank == 0:
        print(f"{sum(data[kind].num_nodes for kind in data.node_types):,} nodes, "
              f"{sum(store.edge_index.shape[1] for store in data.edge_stores):,} edges")  # fmt: skip
    if args.write_parts is not None:
        write_parts(data, args)
    elif args.partition is not None:
        with DistGraph(args.partition, device=args.device) as graph:
            train(graph, data, args)
    else:
        train(data, data, args)
    if dist.is_initialized():
        # DDP models are part of a cycle: if one is freed after its group, it may wait forever for a thread of Gloo.
        gc.collect()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
