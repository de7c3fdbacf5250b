"""A plain training script that reads features from host memory in place: two lines changed, as in PyTorch-Direct.

A comment (`was`) has the original of each changed line. The script imports `pyg_direct` already, for its sampler;
otherwise the import is a third line.

    python examples/unified_two_lines.py

takes its data as `ogbn_products_sage.py` does.
"""

import torch
from model import LayerSAGE, classify_all, describe, fit, load_dataset, parse, print_scores

import pyg_direct


def main() -> None:
    args = parse(__doc__, epochs=6, batch_size=256).parse_args()

    torch.manual_seed(args.seed)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dataset = load_dataset(args.data, args.scale, device)
    print(describe(dataset, device))
    sampler = pyg_direct.GraphSageSampler(pyg_direct.CSRTopo(dataset.edge_index, num_nodes=dataset.num_nodes),
                                          sizes=[15, 10], device=device, seed=args.seed)  # fmt: skip
    hidden = 256 if device.type == "cuda" else 128
    model = LayerSAGE(dataset.num_features, hidden, dataset.num_classes, num_layers=2).to(device)
    y = dataset.y.to(device)
    x = pyg_direct.to_unified(dataset.x)  # was: x = dataset.x

    def predict(seeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        n_id, batch_size, adjs = sampler.sample(seeds)
        rows = x[n_id]  # was: rows = x[n_id.cpu()].to(device)
        return model(rows, adjs), y[n_id[:batch_size]]

    seed_loader = torch.utils.data.DataLoader(dataset.train_idx, batch_size=args.batch_size, shuffle=True)
    fit(model, seed_loader, predict, args.epochs)

    print_scores(classify_all(predict, dataset), dataset, device, hidden)


if __name__ == "__main__":
    main()
