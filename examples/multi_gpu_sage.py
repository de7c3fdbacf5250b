"""Train GraphSAGE on all GPUs of this host with PyTorch's DDP: `ranks="auto"` is all that the loader needs.

    torchrun --nproc-per-node=gpu examples/multi_gpu_sage.py
    python examples/multi_gpu_sage.py

do the same; the second starts a process for each GPU itself and loads the graph once for all of them. With at most one
GPU there is one process; `--processes 2 --device cpu` trains with two on the CPU. Data as in `ogbn_products_sage.py`.
"""

import argparse
import gc
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from model import (
    above_zero,
    at_least_one,
    classify_seeds,
    count_processes,
    describe,
    load_dataset,
    parse,
    score,
    stay_on_host,
)
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

from pyg_direct import NeighborLoader
from pyg_direct.datasets import NodeDataset


def train(rank: int, count: int, dataset: NodeDataset, args: argparse.Namespace) -> None:
    """Train in one process, whose process group exists."""
    torch.manual_seed(args.seed)
    device = torch.device("cuda", rank) if args.device == "cuda" else torch.device("cpu")
    data: Data = dataset.to_data()
    options = {"device": device, "placement": args.placement, "feature_cache": args.feature_cache, "seed": args.seed}
    # Batches are made as for one process, and dealt out in turn. A global step has `count` batches.
    train_loader = NeighborLoader(data, num_neighbors=[15, 10, 5], input_nodes=data.train_mask, shuffle=True,
                                  batch_size=args.batch_size, ranks="auto", **options)  # fmt: skip

    hidden = args.hidden or (256 if device.type == "cuda" else 64)
    model = GraphSAGE(dataset.num_features, hidden, num_layers=3, out_channels=dataset.num_classes, dropout=0.3)
    model = model.to(device)
    parallel = DistributedDataParallel(model, [device] if device.type == "cuda" else None)
    optimizer = torch.optim.Adam(parallel.parameters(), lr=args.lr)

    for epoch in range(1, args.epochs + 1):
        parallel.train()
        begin, total_loss, num_seeds = time.perf_counter(), torch.zeros((), device=device), 0
        for batch in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(classify_seeds(parallel, batch), batch.y[: batch.batch_size])
            loss.backward()
            optimizer.step()
            total_loss += loss.detach() * batch.batch_size
            num_seeds += batch.batch_size
        totals = torch.stack([total_loss, torch.tensor(float(num_seeds), device=device)])
        dist.all_reduce(totals)
        if rank == 0:
            loss, seconds = float(totals[0] / totals[1]), time.perf_counter() - begin
            print(f"epoch {epoch}: loss {loss:.4f}, {seconds:.2f} s, {len(train_loader)} steps of {count} batches")

    # Every process classifies its share of the nodes, with any number of batches, as no step waits for other processes.
    parallel.eval()
    loader = NeighborLoader(data, num_neighbors=[15, 10, 5], batch_size=1024, ranks="auto", uneven="keep", **options)
    predicted = torch.zeros(dataset.num_nodes, dtype=torch.int64, device=device)
    with torch.no_grad():
        for batch in loader:
            predicted[batch.n_id[: batch.batch_size]] = classify_seeds(model, batch).argmax(1)
    dist.all_reduce(predicted)
    if rank == 0:
        scores = score(predicted.cpu(), dataset)
        print("GraphSAGE: train {train:.2%}, valid {valid:.2%}, test {test:.2%}".format(**scores))


def run(rank: int, count: int, dataset: NodeDataset | None, args: argparse.Namespace, address: str) -> None:
    """Join the group and train."""
    if args.device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo", init_method=address, rank=rank,
                            world_size=count)  # fmt: skip
    if dataset is None:
        dataset = load_dataset(args.data, args.scale, torch.device(args.device))
    if rank == 0:
        print(f"{describe(dataset, torch.device(args.device))} with {count} processes")
    train(rank, count, dataset, args)
    # DDP models are part of a cycle: if one is freed after its group, it may wait forever for a thread of Gloo.
    gc.collect()
    # Not after an error: the launcher then ends the other processes.
    dist.destroy_process_group()


def main() -> None:
    parser = parse(__doc__, epochs=8, batch_size=256)
    parser.add_argument("--processes", type=at_least_one, help="all GPUs; one on a CPU")
    parser.add_argument("--placement", default="auto", choices=["auto", "cuda", "unified", "pinned", "cpu"])
    parser.add_argument("--feature-cache", help="GPU memory for hot rows when features are on the host, e.g. 20%%")
    parser.add_argument("--hidden", type=at_least_one, help="256 on a GPU, 64 on a CPU")
    parser.add_argument("--lr", type=above_zero, default=0.005)
    args = parser.parse_args()
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")

    if "WORLD_SIZE" in os.environ:  # torchrun
        run(int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"]), None, args, "env://")
        return
    count = count_processes(args.processes, args.device)
    dataset = load_dataset(args.data, args.scale, torch.device(args.device))
    stay_on_host()
    with tempfile.TemporaryDirectory() as folder:
        # Tensors go through shared memory: every process has the same edges and features.
        mp.spawn(run, args=(count, dataset, args, f"file://{folder}/group"), nprocs=count)


if __name__ == "__main__":
    main()
