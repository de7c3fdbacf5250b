"""Train GraphSAGE with Quiver's three components: topology, sampler, feature.

    python examples/ogbn_products_quiver_style.py

takes its data as `ogbn_products_sage.py` does. `n_id, batch_size, adjs` come in Quiver's order, with the edge ids that
Quiver leaves empty. Neighbors are the sources of edges, as in PyG; `CSRTopo(..., direction="out")` has Quiver's.
`multi_gpu_quiver_style.py` shares all three between processes.
"""

import torch
from model import LayerSAGE, classify_all, describe, fit, load_dataset, parse, print_scores

from pyg_direct import CSRTopo, Feature, GraphSageSampler


def main() -> None:
    parser = parse(__doc__, epochs=6, batch_size=256)
    parser.add_argument("--mode", default="auto", help="GPU, UVA, CPU or auto")
    parser.add_argument("--cache", default="20%", help="GPU memory for hot rows")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dataset = load_dataset(args.data, args.scale, device)
    print(describe(dataset, device))

    csr_topo = CSRTopo(dataset.edge_index, num_nodes=dataset.num_nodes)  # step 1
    sampler = GraphSageSampler(csr_topo, sizes=[15, 10, 5], device=device, mode=args.mode, seed=args.seed)  # step 2
    feature = Feature(device_cache_size=args.cache, csr_topo=csr_topo, device=device)  # step 3
    feature.from_cpu_tensor(dataset.x)
    print(feature)

    hidden = 256 if device.type == "cuda" else 128
    model = LayerSAGE(dataset.num_features, hidden, dataset.num_classes, num_layers=3).to(device)
    y = dataset.y.to(device)

    def predict(seeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        n_id, batch_size, adjs = sampler.sample(seeds)
        return model(feature[n_id], adjs), y[n_id[:batch_size]]

    seed_loader = torch.utils.data.DataLoader(dataset.train_idx, batch_size=args.batch_size, shuffle=True)
    fit(model, seed_loader, predict, args.epochs)

    print_scores(classify_all(predict, dataset), dataset, device, hidden)


if __name__ == "__main__":
    main()
