"""Classify many small graphs, such as molecules: they are collated in memory once, and batches are cut out of it.

    python examples/molecules.py

Any list of `Data` or `InMemoryDataset` (ZINC, QM9, TUDataset, ...) can be used, as in PyG.
"""

import torch
import torch.nn.functional as F
from model import fit, parse
from torch import Tensor
from torch.utils.data import random_split
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GIN, global_add_pool

import pyg_direct
from pyg_direct import DataLoader  # was: from torch_geometric.loader import DataLoader

KINDS = 3


def make_molecule() -> Data:
    """Make a tree of atoms of some kinds; its class is the kind at most ends of bonds."""
    count = int(torch.randint(10, 30, ()))
    bonds = torch.stack([torch.arange(1, count), (torch.rand(count - 1) * torch.arange(1, count)).long()])
    kinds = torch.randint(KINDS, (count,))
    pairs = kinds[bonds]
    most = torch.bincount(pairs[0][pairs[0] == pairs[1]], minlength=KINDS).argmax()
    return Data(x=F.one_hot(kinds, KINDS).float(), edge_index=torch.cat([bonds, bonds.flip(0)], 1), y=most.view(1))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gin = GIN(KINDS, 32, num_layers=3)
        self.head = torch.nn.Linear(32, KINDS)

    def forward(self, batch: Batch) -> Tensor:
        atoms = self.gin(batch.x, batch.edge_index)
        return self.head(global_add_pool(atoms, batch.batch, batch.num_graphs))


def main() -> None:
    args = parse(__doc__, epochs=8, batch_size=128, scale=1.0).parse_args()

    torch.manual_seed(args.seed)
    molecules = [make_molecule() for _ in range(int(6000 * args.scale))]
    train, test = random_split(molecules, [0.8, 0.2])
    loader = DataLoader(train, args.batch_size, shuffle=True, device=args.device)
    model = Model().to(loader.device)
    pyg_direct.accelerate(model)
    fit(model, loader, lambda batch: (model(batch), batch.y), args.epochs)

    with torch.no_grad():
        right = sum(int((model(batch).argmax(1) == batch.y).sum())
                    for batch in DataLoader(test, 1024, device=args.device))  # fmt: skip
    print(f"test molecules: {100 * right / len(test):.1f}% right")


if __name__ == "__main__":
    main()
