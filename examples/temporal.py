"""Predict the next links of a graph with times of edges, from the past alone.

    python examples/temporal.py

A batch has links with their times, and `time_attr` names the times of the edges. Only edges before a link are sampled
around it (`time_comparison="<"`; PyG allows equal times), the latest ones first (`temporal_strategy="last"`). Each link
has its own tree, so that it does not see the past of a later link. The script trains on the first three quarters of the
time, and separates the later links from pairs drawn at random.
"""

import torch
import torch.nn.functional as F
from model import fit, parse
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

from pyg_direct import LinkNeighborLoader  # was: from torch_geometric.loader import LinkNeighborLoader
from pyg_direct.datasets.dynamic_graphs import DynamicShape, draw_snapshots

NUM_TIMES = 16


class Model(torch.nn.Module):
    """Scores of links from embeddings of nodes and of their neighbors."""

    def __init__(self, num_nodes: int, hidden: int) -> None:
        super().__init__()
        self.nodes = torch.nn.Embedding(num_nodes, hidden)
        self.sage = GraphSAGE(hidden, hidden, num_layers=2)

    def forward(self, batch: Data) -> torch.Tensor:
        z = self.sage(self.nodes(batch.n_id), batch.edge_index)
        source, target = batch.edge_label_index
        return (z[source] * z[target]).sum(1)


def main() -> None:
    args = parse(__doc__, epochs=3, batch_size=512, scale=0.0005).parse_args()

    torch.manual_seed(args.seed)
    # Pairs of nodes, most of which meet repeatedly.
    num_nodes = max(50, int(2_449_029 * args.scale))
    snapshots = draw_snapshots(DynamicShape(num_nodes, 2 * num_nodes, NUM_TIMES, change=0.2), args.seed)
    links, time = torch.cat(snapshots, 1), torch.arange(NUM_TIMES).repeat_interleave(2 * num_nodes)
    data = Data(num_nodes=num_nodes, edge_index=torch.cat([links, links.flip(0)], 1), time=time.repeat(2))
    is_early = time < NUM_TIMES * 3 // 4

    def load(chosen: torch.Tensor, **options) -> LinkNeighborLoader:
        return LinkNeighborLoader(data, [8, 4], links[:, chosen], edge_label_time=time[chosen], time_attr="time",
                                  temporal_strategy="last", time_comparison="<", neg_sampling="binary",
                                  batch_size=args.batch_size, device=args.device, seed=0, **options)  # fmt: skip

    train_loader, test_loader = load(is_early, shuffle=True), load(~is_early)
    model = Model(num_nodes, 32).to(train_loader.device)

    def predict(batch: Data) -> tuple[torch.Tensor, torch.Tensor]:
        return model(batch), batch.edge_label

    fit(model, train_loader, predict, args.epochs, lr=0.01, loss_of=F.binary_cross_entropy_with_logits)

    with torch.no_grad():
        right = torch.cat([(out > 0) == label for out, label in map(predict, test_loader)])
    print(f"later links and other pairs, told apart: {right.float().mean():.1%} (chance: 50 %)")


if __name__ == "__main__":
    main()
