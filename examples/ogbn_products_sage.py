"""Train GraphSAGE with the drop-in loader: only the import of `NeighborLoader` differs from a plain PyG script.

    python examples/ogbn_products_sage.py

uses a folder given by `--data` or the environment variable PYG_DIRECT_DATA (see `pyg_direct.datasets.load_folder`);
without one, ogbn-products if the `ogb` package can load it and no `--scale` is given, otherwise a generated graph of
the same shape.
"""

import sys
import time

import torch
import torch.nn.functional as F
from model import above_zero, at_least_one, describe, load_dataset, parse, print_scores
from torch_geometric.nn import GraphSAGE
from tqdm import tqdm

from pyg_direct import GraphedStep, NeighborLoader, accelerate  # was: from torch_geometric.loader import NeighborLoader


def main() -> None:
    parser = parse(__doc__, epochs=8, batch_size=256)
    parser.add_argument("--placement", default="auto", choices=["auto", "cuda", "unified", "pinned", "cpu"])
    parser.add_argument("--feature-cache", help="GPU memory for hot rows when features are on the host, e.g. 20%%")
    parser.add_argument("--accelerate", action="store_true", help="the layers through pyg_direct's kernels too")
    parser.add_argument("--replay", action="store_true", help="and the model's passes as CUDA graphs, on a GPU")
    parser.add_argument("--graphed", action="store_true", help="or each step as one CUDA graph, in a loop of its own")
    parser.add_argument(
        "--super-batch", type=at_least_one, help="batches whose rows on the host are read at once, e.g. 8"
    )
    parser.add_argument("--hidden", type=at_least_one, help="256 on a GPU, 128 on a CPU")
    parser.add_argument("--lr", type=above_zero, default=0.005)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dataset = load_dataset(args.data, args.scale, device)
    data = dataset.to_data()
    print(describe(dataset, device))

    options = {"device": device, "placement": args.placement, "feature_cache": args.feature_cache, "seed": args.seed}
    train_loader = NeighborLoader(data, num_neighbors=[15, 10, 5], input_nodes=data.train_mask,
                                  batch_size=args.batch_size, shuffle=True, super_batch=args.super_batch,
                                  **options)  # fmt: skip
    # All neighbors of all nodes, one layer at a time, for the accuracies.
    all_loader = NeighborLoader(data, num_neighbors=[-1], batch_size=4096, **options)

    hidden = args.hidden or (256 if device.type == "cuda" else 128)
    model = GraphSAGE(dataset.num_features, hidden, num_layers=3, out_channels=dataset.num_classes, dropout=0.3)
    model = model.to(device)
    if args.accelerate or args.replay or args.graphed:
        accelerate(model, replay=args.replay)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=device.type == "cuda")

    def compute(batch):
        out = model(batch.x, batch.edge_index, num_sampled_nodes_per_hop=batch.num_sampled_nodes,
                    num_sampled_edges_per_hop=batch.num_sampled_edges)[: batch.batch_size]  # fmt: skip
        return F.cross_entropy(out, batch.y[: batch.batch_size])

    def train(batch):
        optimizer.zero_grad()
        loss = compute(batch)
        loss.backward()
        optimizer.step()
        return loss

    step = GraphedStep(model, compute, optimizer) if args.graphed else train
    for epoch in range(1, args.epochs + 1):
        model.train()
        begin, total_loss = time.perf_counter(), 0.0
        for batch in tqdm(train_loader, desc=f"epoch {epoch}", leave=False, disable=None):
            total_loss += step(batch).detach() * batch.batch_size
        mean_loss = float(total_loss) / int(data.train_mask.sum())
        print(f"epoch {epoch}: loss {mean_loss:.4f}, {time.perf_counter() - begin:.2f} s")

    model.eval()
    with torch.no_grad():
        predicted = model.inference(all_loader, device, embedding_device=device, progress_bar=sys.stderr.isatty())
    print_scores(predicted.argmax(1).cpu(), dataset, device, hidden)


if __name__ == "__main__":
    main()
