"""Train GraphSAGE on all GPUs of this host in Quiver's steps: topology, sampler and feature are made once and sent.

    python examples/multi_gpu_quiver_style.py

Hot rows are divided over GPUs joined by NVLink (`--policy device_replicate` gives each GPU its own). With one GPU there
is one process; without any, `--processes 2` trains on the CPU. Data as in `ogbn_products_sage.py`.
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
from model import LayerSAGE, at_least_one, count_processes, describe, load_dataset, parse, stay_on_host
from torch.nn.parallel import DistributedDataParallel

import pyg_direct as quiver


def train(rank: int, count: int, dataset, sampler, feature, args: argparse.Namespace) -> None:
    on_gpu = args.device == "cuda"
    torch.manual_seed(args.seed)
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    model = LayerSAGE(dataset.num_features, 256 if on_gpu else 64, dataset.num_classes, 3).to(device)
    model = DistributedDataParallel(model, [rank] if on_gpu else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    y = dataset.y.to(device)
    # Every process trains on a part of the nodes, as in Quiver's example; all have equally many batches.
    train_idx = dataset.train_idx[: len(dataset.train_idx) // count * count].chunk(count)[rank]
    seed_loader = torch.utils.data.DataLoader(train_idx, batch_size=args.batch_size, shuffle=True)

    for epoch in range(1, args.epochs + 1):
        model.train()
        begin, total_loss = time.perf_counter(), torch.zeros((), device=device)
        for number, seeds in enumerate(seed_loader):
            # Processes must draw differently: the key identifies the batch, process and epoch.
            key = (epoch * len(seed_loader) + number) * count + rank
            n_id, batch_size, adjs = sampler.sample(seeds, key=key)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(feature[n_id], adjs), y[n_id[:batch_size]])
            loss.backward()
            optimizer.step()
            total_loss += loss.detach() * batch_size
        dist.all_reduce(total_loss)
        if rank == 0:
            mean_loss = float(total_loss) / (len(train_idx) * count)
            print(f"epoch {epoch}: loss {mean_loss:.4f}, {time.perf_counter() - begin:.2f} s")
    if rank == 0:
        print(feature)


def run(rank: int, count: int, dataset, sampler, feature, args: argparse.Namespace, address: str) -> None:
    on_gpu = args.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if on_gpu else "gloo", init_method=address, rank=rank, world_size=count)
    train(rank, count, dataset, sampler, feature, args)
    # DDP models are part of a cycle: if one is freed after its group, it may wait forever for a thread of Gloo.
    gc.collect()
    dist.destroy_process_group()


def main() -> None:
    parser = parse(__doc__, epochs=6, batch_size=256)
    parser.add_argument("--processes", type=at_least_one, help="all GPUs; one on a CPU")
    parser.add_argument("--policy", default="p2p_clique_replicate", help="or device_replicate")
    parser.add_argument("--cache", default="20%", help="memory of each GPU for hot rows")
    args = parser.parse_args()
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu, count = args.device == "cuda", count_processes(args.processes, args.device)
    dataset = load_dataset(args.data, args.scale, torch.device(args.device))
    print(f"{describe(dataset, torch.device(args.device))} with {count} processes")

    devices = list(range(count))
    if on_gpu:
        print(quiver.p2pCliqueTopo(devices).info())
    csr_topo = quiver.CSRTopo(dataset.edge_index, num_nodes=dataset.num_nodes)  # step 1
    sampler = quiver.GraphSageSampler(csr_topo, sizes=[15, 10, 5], mode="UVA" if on_gpu else "CPU")  # step 2
    feature = quiver.Feature(rank=0, device_list=devices, device_cache_size=args.cache, cache_policy=args.policy,
                             csr_topo=csr_topo, device=None if on_gpu else "cpu")  # fmt: skip
    feature.from_cpu_tensor(dataset.x)  # step 3

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    stay_on_host()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(count, dataset, sampler, feature, args, f"file://{folder}/group"), nprocs=count)


if __name__ == "__main__":
    main()
