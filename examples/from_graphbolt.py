"""GraphBolt's chain of stages with this package: one loader, whose arguments are the stages.

    python examples/from_graphbolt.py

There, an ItemSampler makes batches of seeds, and a stage samples neighbors, with fanouts from the outermost layer
inwards. Further stages fetch features, copy to the GPU, and convert the batch to PyG's. Here batches are PyG's, on the
device. Fanouts go from the seeds outwards, and parallel edges are kept. There, times of neighbors are below the seed's;
here this is `time_comparison="<"`, with a window by `time_window=`.
"""

import torch
from model import classify_seeds, fit, parse
from torch_geometric.nn import GraphSAGE

from pyg_direct import NeighborLoader
from pyg_direct.datasets import synthetic_graph


def main() -> None:
    args = parse(__doc__, epochs=3, batch_size=256, scale=0.01).parse_args()

    torch.manual_seed(args.seed)
    dataset = synthetic_graph("products", scale=args.scale)
    loader = NeighborLoader(
        dataset.to_data(),  # the sampling graph and the feature store
        num_neighbors=[10, 5],  # [5, 10] there
        input_nodes=dataset.train_idx, batch_size=args.batch_size, shuffle=True, seed=args.seed,  # the ItemSampler
        sampling="labor",  # the stage that samples layers; "uniform" is the one that samples neighbors
        layer_dependency=True,  # same name there; "batch dependency" is not supported, but `super_batch=` is
        topology_cache="20%",  # edges cached on the GPU
        feature_cache="20%",  # features cached on the GPU; `Feature(host_cache_size=).from_file()` caches those on disk
        prefetch=2,  # fetching beside training needs no stage of its own
        device=args.device,  # instead of a stage that copies
    )  # fmt: skip
    model = GraphSAGE(dataset.num_features, 64, num_layers=2, out_channels=dataset.num_classes).to(loader.device)
    fit(model, loader, lambda batch: (classify_seeds(model, batch), batch.y[: batch.batch_size]), args.epochs, lr=0.01)

    batch = next(iter(loader))
    print(f"a batch of {batch.batch_size} seeds: {batch.num_nodes} nodes, {batch.num_edges} edges, on {batch.x.device}")


if __name__ == "__main__":
    main()
