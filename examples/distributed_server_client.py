"""Train GraphSAGE in a process that holds no part of the graph: servers hold the parts, Ray runs them.

On one host, with a server for each of two parts (needs `pip install ".[ray]"` in the clone):

    python examples/distributed_server_client.py

On a cluster, start Ray on its hosts (`ray start --head` on one, `ray start --address HOST:6379` on the others), make
the partition visible to all of them, and name the cluster. `--client 0/2` and `--client 1/2` in two programs share the
batches:

    python examples/distributed_server_client.py --address auto --partition /data/products

Data as in `ogbn_products_sage.py`.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from model import above_zero, at_least_one, classify_seeds, fit, load_dataset, parse
from torch_geometric.nn import GraphSAGE

from pyg_direct.datasets import NodeDataset
from pyg_direct.distributed import DistNeighborLoader, partition_graph
from pyg_direct.distributed.server.client_graph import ClientGraph


def train(graph: ClientGraph, dataset: NodeDataset, args: argparse.Namespace) -> None:
    """Train with batches from the servers."""
    torch.manual_seed(args.seed)
    loader = DistNeighborLoader(graph, [15, 10, 5], dataset.train_idx, batch_size=args.batch_size, shuffle=True,
                                seed=args.seed, prefetch=2)  # fmt: skip
    model = GraphSAGE(dataset.num_features, args.hidden, num_layers=3, out_channels=dataset.num_classes, dropout=0.3)
    model = model.to(graph.device)
    fit(model, loader, lambda batch: (classify_seeds(model, batch), batch.y[: batch.batch_size]), args.epochs, args.lr)


def main() -> None:
    parser = parse(__doc__, epochs=4, batch_size=512)
    parser.add_argument("--partition", type=Path, help="folder of the partition; a temporary one on one host")
    parser.add_argument("--address", help="of a Ray cluster; none starts Ray on this host")
    parser.add_argument("--client", default="0/1", help="number of this client / number of clients")
    parser.add_argument("--hidden", type=at_least_one, default=64)
    parser.add_argument("--lr", type=above_zero, default=0.005)
    args = parser.parse_args()
    # Ray is an extra, which `--help` does not need.
    from pyg_direct.distributed.server.ray_servers import connect, serve

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
        train(graph, dataset, args)
        graph.close()
        if number == 0 and count == 1:
            servers.close()


if __name__ == "__main__":
    main()
