"""Train on features that fit neither GPU memory nor host memory: they stay in a file, with hot rows in two caches.

    python examples/larger_than_gpu_memory.py

If a graph does not fit the GPU, there are three steps. `NeighborLoader(data, ...)` leaves the excess on the host.
`feature_cache="20%"` gives hot rows GPU memory. A `Feature` over a file, as here, adds the disk. On a machine without a
GPU, there is no cache in GPU memory.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from model import classify_seeds, fit, parse
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

from pyg_direct import CSRTopo, Feature, FeatureStore, NeighborLoader
from pyg_direct.datasets import NodeDataset, fill_features, synthetic_graph

NUM_FEATURES = 100


def write_features(path: Path, dataset: NodeDataset) -> None:
    """Write rows through a memory map: they are never in memory all at once."""
    rows = np.lib.format.open_memmap(path, "w+", np.float32, (dataset.num_nodes, NUM_FEATURES))
    fill_features(torch.from_numpy(rows), dataset.y, seed=0, num_classes=dataset.num_classes, feature_signal=2.5)


def train(path: Path, dataset: NodeDataset, args: argparse.Namespace) -> None:
    csr_topo = CSRTopo(dataset.edge_index, num_nodes=dataset.num_nodes)  # ranks rows by their number of listings
    feature = Feature(device_cache_size=args.device_cache, host_cache_size=args.host_cache, csr_topo=csr_topo,
                      device=args.device).from_file(path)  # fmt: skip
    feature.count_served()
    rows = FeatureStore(args.device)
    rows.put_tensor(feature, group_name=None, attr_name="x", index=None)
    rows.put_tensor(dataset.y, group_name=None, attr_name="y", index=None)
    graph = Data(edge_index=dataset.edge_index, num_nodes=dataset.num_nodes)  # PyG's `Data` is a store of edges, too
    loader = NeighborLoader((rows, graph), [10, 5], dataset.train_idx, batch_size=args.batch_size, shuffle=True,
                            device=args.device, seed=args.seed)  # fmt: skip

    model = GraphSAGE(NUM_FEATURES, 64, num_layers=2, out_channels=dataset.num_classes).to(loader.device)
    fit(model, loader, lambda batch: (classify_seeds(model, batch), batch.y[: batch.batch_size]), args.epochs, lr=0.01)
    feature.report()


def main() -> None:
    parser = parse(__doc__, epochs=3, batch_size=256, scale=0.01)
    parser.add_argument("--device-cache", default="10%", help="GPU memory for hot rows: a share of them, or 2G")
    parser.add_argument("--host-cache", default="20%", help="host memory for the next ones")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    dataset = synthetic_graph("products", scale=args.scale, topology_only=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.npy"
        write_features(path, dataset)
        print(f"{path.stat().st_size / 2**20:.1f} MiB of features in a file")
        train(path, dataset, args)


if __name__ == "__main__":
    main()
