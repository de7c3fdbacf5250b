"""GraphLearn-for-PyTorch's steps with this package: a comment above each describes the original step.

    python examples/from_glt.py

Batches are PyG's: `n_id` and `e_id` replace GraphLearn's `node` and `edge`, and `input_id` has the positions of the
seeds. `batch` (with `disjoint=True`) is the tree of a node instead of its seed. Neighbors are the sources of edges, as
in PyG.
"""

import torch
from model import classify_seeds, fit, parse
from torch_geometric.nn import GraphSAGE

from pyg_direct import NeighborLoader, RandomNegativeSampler, SubGraphLoader
from pyg_direct.datasets import synthetic_graph


def main() -> None:
    args = parse(__doc__, epochs=3, batch_size=256, scale=0.01).parse_args()

    torch.manual_seed(args.seed)
    # There: a Dataset with edges, features and labels. Here: PyG's `Data`.
    dataset = synthetic_graph("products", scale=args.scale)
    data = dataset.to_data()

    # There: the graph's mode, CUDA or ZERO_COPY, and the features' split ratio. Here: `placement`, "cuda" or "unified"
    # ("auto" chooses), and `feature_cache`. The driver finds groups of GPUs joined by NVLink
    # (`cache_policy="p2p_clique_replicate"`). Batches always have edge ids; `weight_attr=` names weights, on the GPU
    # too.
    options = {"placement": "auto", "feature_cache": "20%", "device": args.device, "seed": args.seed}
    loader = NeighborLoader(data, [10, 5], data.train_mask, batch_size=args.batch_size, shuffle=True, **options)
    model = GraphSAGE(data.num_features, 64, num_layers=2, out_channels=dataset.num_classes).to(loader.device)
    fit(model, loader, lambda batch: (classify_seeds(model, batch), batch.y[: batch.batch_size]), args.epochs, lr=0.01)

    # There and here: induced subgraphs, with `mapping` to the seeds.
    batch = next(iter(SubGraphLoader(data, dataset.val_idx, [10], batch_size=64, **options)))
    seeds = batch.n_id[batch.mapping].cpu()
    print(f"around {len(seeds)} seeds: {batch.num_nodes} nodes and all {batch.num_edges} edges among them; the seeds "
          f"are {'those given' if torch.equal(seeds, dataset.val_idx[:64]) else 'others'}")  # fmt: skip

    # There and here: pairs without an edge. `neg_sampling` of `LinkNeighborLoader` adds them to batches of links.
    pairs = RandomNegativeSampler(data.edge_index, num_nodes=data.num_nodes, device=args.device, seed=args.seed)
    print(f"{pairs.sample(1000).shape[1]} pairs that are no edge")


if __name__ == "__main__":
    main()
