"""Train GraphSAGE in a process that holds no part of the graph: servers hold the parts, Ray runs them.

On one host, with a server for each of two parts (needs `pip install "pyg_direct[ray]"`):

    python examples/distributed_server_client.py

On a cluster, start Ray on its hosts (`ray start --head` on one, `ray start --address HOST:6379` on the others), let all
of them see the partition, and name the cluster; `--client 0/2` and `--client 1/2` in two programs share the batches:

    python examples/distributed_server_client.py --address auto --partition /data/products

Data as in `ogbn_products_sage.py`.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from model import load_dataset
from torch_geometric.nn import GraphSAGE

from pyg_direct.distributed import DistNeighborLoader, partition_graph
from pyg_direct.distributed.client import ClientGraph
from pyg_direct.distributed.engine import connect, serve


def train(graph: ClientGraph, train_nodes: torch.Tensor, num_classes: int, args: argparse.Namespace) -> None:
    """Train with batches that the servers answer for."""
    torch.manual_seed(args.seed)
    loader = DistNeighborLoader(graph, [15, 10, 5], train_nodes, batch_size=args.batch_size, shuffle=True,
                                seed=args.seed, prefetch=2)  # fmt: skip
    model = GraphSAGE(-1, args.hidden, num_layers=3, out_channels=num_classes, dropout=0.3).to(graph.device)
    optimizer = None
    for epoch in range(1, args.epochs + 1):
        begin, total, right, count = time.perf_counter(), 0.0, 0, 0
        for batch in loader:
            out = model(batch.x, batch.edge_index, num_sampled_nodes_per_hop=batch.num_sampled_nodes,
                        num_sampled_edges_per_hop=batch.num_sampled_edges)[: batch.batch_size]  # fmt: skip
            loss = F.cross_entropy(out, batch.y[: batch.batch_size])
            # The first batch tells the model how many features there are.
            optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=args.lr)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += float(loss.detach()) * batch.batch_size
            right += int((out.argmax(1) == batch.y[: batch.batch_size]).sum())
            count += batch.batch_size
        print(f"epoch {epoch}: loss {total / count:.4f}, right {right / count:.1%}, "
              f"{time.perf_counter() - begin:.2f} s", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder with graph.npz and features")
    parser.add_argument("--scale", type=float, help="size of the generated graph; 1 is ogbn-products")
    parser.add_argument("--partition", type=Path, help="folder of the partition; a temporary one on one host")
    parser.add_argument("--address", help="of a Ray cluster; none starts Ray on this host")
    parser.add_argument("--client", default="0/1", help="number of this client / number of clients")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="where to train; the GPU if there is one")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    dataset = load_dataset(args.data, args.scale, torch.device("cpu"))
    number, count = (int(part) for part in args.client.split("/"))
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.partition or Path(scratch) / "parts"
        if not folder.exists():
            rows = {"x": dataset.x, "y": dataset.y}
            partition_graph(folder, dataset.edge_index, 2, num_nodes=dataset.num_nodes, node_rows=rows)
        if number == 0:
            servers = serve(folder, num_cpus=0.5, address=args.address)
        else:
            servers = connect(len(list(folder.glob("part-*"))), address=args.address)
        graph = ClientGraph(servers, device=args.device, client=(number, count))
        train(graph, dataset.train_idx, dataset.num_classes, args)
        graph.close()
        if number == 0 and count == 1:
            servers.close()


if __name__ == "__main__":
    main()
