"""Predict links: batches around links, with strict negatives, and without the predicted links as edges.

    python examples/link_prediction.py

trains on 90 % of the links of a generated graph, and separates the others from pairs that are not linked.
"""

import torch
import torch.nn.functional as F
from model import fit, parse
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

from pyg_direct import LinkNeighborLoader  # was: from torch_geometric.loader import LinkNeighborLoader
from pyg_direct.datasets import synthetic_graph


def main() -> None:
    args = parse(__doc__, epochs=3, batch_size=1024, scale=0.001).parse_args()

    torch.manual_seed(args.seed)
    # Most edges lie inside a class, so that features are informative.
    dataset = synthetic_graph("products", scale=args.scale, homophily=0.8)
    links = dataset.edge_index[:, dataset.edge_index[0] < dataset.edge_index[1]]
    links = links[:, torch.randperm(links.shape[1])]
    held_out, links = links[:, : links.shape[1] // 10], links[:, links.shape[1] // 10 :]
    data = Data(x=dataset.x, edge_index=torch.cat([links, links.flip(0)], 1))

    options = {"neg_sampling": "binary", "strict_negatives": True, "batch_size": args.batch_size,
               "device": args.device, "seed": args.seed}  # fmt: skip
    # A predicted link is excluded from the edges of its batch, in both directions.
    train_loader = LinkNeighborLoader(data, [10, 5], links, shuffle=True, exclude_target_edges="reverse", **options)
    test_loader = LinkNeighborLoader(data, [10, 5], held_out, **options)
    model = GraphSAGE(data.num_features, 64, num_layers=2).to(train_loader.device)

    def predict(batch: Data) -> tuple[torch.Tensor, torch.Tensor]:
        z = model(batch.x, batch.edge_index)
        source, target = batch.edge_label_index
        return (z[source] * z[target]).sum(1), batch.edge_label

    fit(model, train_loader, predict, args.epochs, loss_of=F.binary_cross_entropy_with_logits)

    with torch.no_grad():
        right = torch.cat([(out > 0) == label for out, label in map(predict, test_loader)])
    print(f"links held out and other pairs, told apart: {right.float().mean():.1%} (chance: 50 %)")


if __name__ == "__main__":
    main()
