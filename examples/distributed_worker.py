"""Train GraphSAGE on a graph in parts: each process holds one part, and samples and fetches from all of them.

On one host, with two processes on the CPU, which partitions the data first:

    python examples/distributed_worker.py --processes 2 --device cpu

On a cluster: partition once, copy to each host its own part (`manifest.json`, `book-*.npy` and `part-0000R`, or use a
shared folder), and start one process per part, for example on two hosts with one GPU each:

    python examples/distributed_worker.py --partition-only --parts 2 --partition /data/products
    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        examples/distributed_worker.py --partition /data/products

`examples/distributed_worker.slurm` does it under SLURM. Data as in `ogbn_products_sage.py`.
"""

import argparse
import gc
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from model import above_zero, at_least_one, classify_seeds, count_processes, load_dataset, parse, stay_on_host
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import GraphSAGE

from pyg_direct.distributed import DistGraph, DistNeighborLoader, partition_graph

SPLITS = ("train", "valid", "test")
FANOUTS = [15, 10, 5]


def write_parts(args: argparse.Namespace, folder: Path, num_parts: int) -> None:
    """Partition the data set; classes and the split are rows of nodes like the features."""
    dataset = load_dataset(args.data, args.scale, torch.device("cpu"))
    data = dataset.to_data()
    split = torch.full((dataset.num_nodes,), -1, dtype=torch.int8)
    for number, nodes in enumerate((dataset.train_idx, dataset.val_idx, dataset.test_idx)):
        split[nodes] = number
    manifest = partition_graph(folder, data.edge_index, num_parts, num_nodes=dataset.num_nodes, method=args.method,
                               node_rows={"x": data.x, "y": data.y, "split": split})  # fmt: skip
    print(f"{folder}: {num_parts} parts, {manifest.num_cut / max(1, data.num_edges):.1%} of the edges between them")


def gather_all(graph: DistGraph, name: str) -> torch.Tensor:
    """Gather a short attribute of all nodes in every process."""
    whole = torch.zeros(graph.num_nodes, dtype=torch.int64, device=graph.device)
    whole[graph.own_nodes()] = graph.own_rows(name).long().to(graph.device)
    dist.all_reduce(whole)
    return whole.cpu()


def train(graph: DistGraph, args: argparse.Namespace) -> dict[str, float]:
    """Train, and find the accuracy on each split."""
    torch.manual_seed(args.seed)
    split, labels = gather_all(graph, "split"), gather_all(graph, "y")
    num_features, device = graph.own_rows("x").shape[1], graph.device
    hidden = args.hidden or (256 if device.type == "cuda" else 64)
    model = GraphSAGE(num_features, hidden, num_layers=3, out_channels=int(labels.max()) + 1, dropout=0.3).to(device)
    parallel = DistributedDataParallel(model, [device] if device.type == "cuda" else None)
    optimizer = torch.optim.Adam(parallel.parameters(), lr=args.lr)
    # All processes need equally many batches: DDP waits for all of them in every step.
    loader = DistNeighborLoader(graph, FANOUTS, (split == 0).nonzero().view(-1), batch_size=args.batch_size,
                                shuffle=True, seed=args.seed, uneven="pad", prefetch=2)  # fmt: skip
    for epoch in range(1, args.epochs + 1):
        parallel.train()
        begin, totals = time.perf_counter(), torch.zeros(2, device=device)
        for batch in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(classify_seeds(parallel, batch), batch.y[: batch.batch_size])
            loss.backward()
            optimizer.step()
            totals += torch.tensor([float(loss.detach()) * batch.batch_size, batch.batch_size], device=device)
        dist.all_reduce(totals)
        if graph.rank == 0:
            seconds = time.perf_counter() - begin
            print(f"epoch {epoch}: loss {totals[0] / totals[1]:.4f}, {seconds:.2f} s", flush=True)

    parallel.eval()
    # Numbers of batches may differ here, as no step waits for other processes.
    counts = torch.zeros(2, len(SPLITS), device=device)
    with torch.no_grad():
        for batch in DistNeighborLoader(graph, FANOUTS, batch_size=1024, seed=args.seed, prefetch=2):
            is_right = classify_seeds(model, batch).argmax(1) == batch.y[: batch.batch_size]
            for number in range(len(SPLITS)):
                chosen = batch.split[: batch.batch_size] == number
                counts[:, number] += torch.stack([is_right[chosen].sum(), chosen.sum()])
    dist.all_reduce(counts)
    return dict(zip(SPLITS, (counts[0] / counts[1].clamp(min=1)).tolist(), strict=True))


def run(rank: int, count: int, args: argparse.Namespace, folder: Path, address: str) -> None:
    """Join the group and train."""
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(device)
    elif address != "env://":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", init_method=address, rank=rank,
                            world_size=count)  # fmt: skip
    share = False if args.exchange else "auto"
    with DistGraph(folder, device=device, replicas=args.replicas, share_graph=share) as graph:
        scores = train(graph, args)
        if rank == 0:
            print(f"part 0 holds {graph.num_bytes / 2**20:.1f} MiB of the graph")
            print("GraphSAGE: train {train:.2%}, valid {valid:.2%}, test {test:.2%}".format(**scores))
    # DDP models are part of a cycle: if one is freed after its group, it may wait forever for a thread of Gloo.
    gc.collect()
    dist.destroy_process_group()


def main() -> None:
    parser = parse(__doc__, epochs=8, batch_size=256)
    parser.add_argument("--partition", type=Path, help="folder of the partition; a temporary one on one host")
    parser.add_argument("--partition-only", action="store_true", help="write the partition and end")
    parser.add_argument("--parts", type=at_least_one, default=2, help="with --partition-only")
    parser.add_argument("--method", default="hash", choices=["hash", "range", "metis", "streaming"],
                        help="metis needs pip install \".[distributed]\" in the clone")  # fmt: skip
    parser.add_argument("--replicas", default="20%", help="rows of others to keep copies of, as a share of the own")
    parser.add_argument(
        "--exchange", action="store_true", help="exchange what batches need on one host too, as several do"
    )
    parser.add_argument("--processes", type=at_least_one, help="without torchrun: all GPUs; two on a CPU")
    parser.add_argument("--hidden", type=at_least_one, help="256 on a GPU, 64 on a CPU")
    parser.add_argument("--lr", type=above_zero, default=0.005)
    args = parser.parse_args()
    if args.partition is None and (args.partition_only or "WORLD_SIZE" in os.environ):
        parser.error("--partition must name the folder, with --partition-only and under torchrun")
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")

    if "WORLD_SIZE" in os.environ:  # torchrun
        run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), args, args.partition, "env://")
        return
    if args.partition_only:
        write_parts(args, args.partition, args.parts)
        return
    count = count_processes(args.processes, args.device, on_cpu=2)
    stay_on_host()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.partition or Path(scratch) / "parts"
        if not folder.exists():
            write_parts(args, folder, count)
        mp.spawn(run, args=(count, args, folder, f"file://{scratch}/group"), nprocs=count)


if __name__ == "__main__":
    main()
