"""Recommend items to users: rows of both are learned, in GPU memory or, if there are too many, on the host.

    python examples/recommendation.py

trains on 90 % of the purchases of a generated shop, and separates the others from items that were not bought.
"""

from typing import Any

import torch
import torch.nn.functional as F
from model import fit, parse
from torch_geometric.data import HeteroData
from torch_geometric.nn import HeteroConv, SAGEConv

from pyg_direct import LinkNeighborLoader, NodeEmbedding, SparseAdam
from pyg_direct.datasets import synthetic_graph

BUYS, BOUGHT_BY = ("user", "buys", "item"), ("item", "bought by", "user")


def open_shop(scale: float) -> tuple[HeteroData, torch.Tensor]:
    """Make users who mostly buy items of one taste; returns the graph without a tenth of the links, and these."""
    graph = synthetic_graph("products", scale=scale, homophily=0.9)
    links = graph.edge_index[:, torch.randperm(graph.num_edges)]
    held_out, links = links.tensor_split([links.shape[1] // 10], 1)
    data = HeteroData(user={"num_nodes": graph.num_nodes}, item={"num_nodes": graph.num_nodes})
    data[BUYS].edge_index, data[BOUGHT_BY].edge_index = links, links.flip(0)
    return data, held_out


class Recommender(torch.nn.Module):
    def __init__(self, data: HeteroData, hidden: int, **options: Any) -> None:
        super().__init__()
        self.rows = torch.nn.ModuleDict(
            {kind: NodeEmbedding(data[kind].num_nodes, hidden, **options) for kind in data.node_types}
        )
        self.conv = HeteroConv({kind: SAGEConv(hidden, hidden) for kind in data.edge_types})

    def forward(self, batch: HeteroData) -> torch.Tensor:
        x = {kind: rows(batch[kind].n_id) for kind, rows in self.rows.items()}
        z = self.conv(x, batch.edge_index_dict)
        user, item = batch[BUYS].edge_label_index
        return ((x["user"] + z["user"])[user] * (x["item"] + z["item"])[item]).sum(1)


def main() -> None:
    parser = parse(__doc__, epochs=4, batch_size=1024, scale=0.001)
    parser.add_argument("--placement", default="auto", choices=["auto", "cuda", "unified", "pinned"],
                        help="memory of the learned rows, and of the optimizer's numbers")  # fmt: skip
    parser.add_argument("--cache", default="0", help="GPU memory for hot rows of a table on the host, such as 20%%")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    data, held_out = open_shop(args.scale)
    options = {"neg_sampling": "binary", "batch_size": args.batch_size, "device": args.device, "seed": args.seed}
    # A predicted link is excluded from the edges of its batch, in both directions.
    train_loader = LinkNeighborLoader(data, [10], BUYS, shuffle=True, exclude_target_edges="reverse", **options)
    test_loader = LinkNeighborLoader(data, [10], (BUYS, held_out), **options)

    cache = args.cache if args.cache.endswith("%") else int(args.cache)
    model = Recommender(data, 32, device=args.device, placement=args.placement, device_cache_size=cache)
    model.to(train_loader.device)
    optimizers = [
        SparseAdam(model.rows.parameters(), lr=0.01),  # the rows of a batch
        torch.optim.Adam(model.conv.parameters(), lr=0.01),  # everything else
    ]

    def predict(batch: HeteroData) -> tuple[torch.Tensor, torch.Tensor]:
        return model(batch), batch[BUYS].edge_label.float()

    fit(model, train_loader, predict, args.epochs, loss_of=F.binary_cross_entropy_with_logits, optimizers=optimizers)

    with torch.no_grad():
        right = torch.cat([(out > 0) == (label > 0) for out, label in map(predict, test_loader)])
    print(f"purchases held out and other pairs, told apart: {right.float().mean():.1%} (chance: 50 %)")


if __name__ == "__main__":
    main()
