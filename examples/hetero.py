"""Classify papers of a graph with types: papers cite papers, authors write them, and only papers have features.

    python examples/hetero.py

Fanouts apply to every relation; a dict sets them separately. Rows of authors are an embedding, looked up by `n_id`.
"""

import torch
import torch_geometric.transforms as T
from model import fit, parse
from torch_geometric.data import HeteroData
from torch_geometric.nn import GraphSAGE, to_hetero

import pyg_direct
from pyg_direct import NeighborLoader  # was: from torch_geometric.loader import NeighborLoader
from pyg_direct.datasets import NodeDataset, synthetic_graph


def add_authors(papers: NodeDataset) -> HeteroData:
    """Make papers of some classes, each with two authors, most of whom write about one class."""
    data = HeteroData()
    data["paper"].update({name: value for name, value in papers.to_data() if name != "edge_index"})
    data["paper", "cites", "paper"].edge_index = papers.edge_index
    in_a_class = max(1, papers.num_nodes // (4 * papers.num_classes))
    data["author"].num_nodes = in_a_class * papers.num_classes
    paper = torch.arange(papers.num_nodes).repeat(2)
    about = torch.where(torch.rand(len(paper)) < 0.7, papers.y[paper], torch.randint(papers.num_classes, paper.shape))
    author = about * in_a_class + torch.randint(in_a_class, paper.shape)
    data["author", "writes", "paper"].edge_index = torch.stack([author, paper])
    return T.ToUndirected()(data)  # with a relation back to authors


class Model(torch.nn.Module):
    def __init__(self, data: HeteroData, num_classes: int) -> None:
        super().__init__()
        self.authors = torch.nn.Embedding(data["author"].num_nodes, data["paper"].num_features)
        self.sage = to_hetero(GraphSAGE((-1, -1), 64, num_layers=2, out_channels=num_classes), data.metadata())

    def forward(self, batch: HeteroData) -> torch.Tensor:
        x = {"paper": batch["paper"].x, "author": self.authors(batch["author"].n_id)}
        return self.sage(x, batch.edge_index_dict)["paper"][: batch["paper"].batch_size]


def main() -> None:
    args = parse(__doc__, epochs=5, batch_size=256, scale=0.01).parse_args()

    torch.manual_seed(args.seed)
    papers = synthetic_graph("products", scale=args.scale)
    data = add_authors(papers)
    options = {"batch_size": args.batch_size, "device": args.device, "seed": args.seed}
    train_loader = NeighborLoader(data, [10, 5], ("paper", data["paper"].train_mask), shuffle=True, **options)
    test_loader = NeighborLoader(data, [10, 5], ("paper", data["paper"].test_mask), **options)

    model = Model(data, papers.num_classes).to(train_loader.device)
    pyg_direct.accelerate(model)  # convolutions aggregate these batches without a tensor of messages
    model(next(iter(train_loader)))  # initializes the lazy sizes of the model

    def predict(batch: HeteroData) -> tuple[torch.Tensor, torch.Tensor]:
        return model(batch), batch["paper"].y[: batch["paper"].batch_size]

    fit(model, train_loader, predict, args.epochs, lr=0.01)

    with torch.no_grad():
        right = torch.cat([out.argmax(1) == y for out, y in map(predict, test_loader)])
    print(f"test papers: {right.float().mean():.1%} right, of {papers.num_classes} classes")


if __name__ == "__main__":
    main()
