"""A plain training script that reads features from host memory in place: the two lines marked `new` are all that
changed, as in PyTorch-Direct.

    python examples/unified_two_lines.py

takes the same options as ogbn_products_sage.py.
"""

import argparse
import time

import torch
import torch.nn.functional as F
from model import describe, load_dataset, score, train_mlp
from torch_geometric.nn import SAGEConv

import pyg_direct


class SAGE(torch.nn.Module):
    def __init__(self, num_features: int, hidden: int, num_classes: int) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList([SAGEConv(num_features, hidden), SAGEConv(hidden, num_classes)])

    def forward(self, x, adjs):
        for layer, (edge_index, _, size) in enumerate(adjs):
            x = self.convs[layer]((x, x[: size[1]]), edge_index)
            if layer < len(self.convs) - 1:
                x = F.dropout(x.relu(), p=0.3, training=self.training)
        return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder with graph.npz and features")
    parser.add_argument("--scale", type=float, help="size of the generated graph; 1 is ogbn-products")
    parser.add_argument("--device", help="cpu or cuda; the GPU if there is one")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=256)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dataset = load_dataset(args.data, args.scale, device)
    print(describe(dataset, device))
    sampler = pyg_direct.GraphSageSampler(pyg_direct.CSRTopo(dataset.edge_index, num_nodes=dataset.num_nodes),
                                          sizes=[15, 10], device=device, seed=0)  # fmt: skip
    hidden = 256 if device.type == "cuda" else 128
    model = SAGE(dataset.num_features, hidden, dataset.num_classes).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    x, y = dataset.x, dataset.y.to(device)
    mlp = train_mlp(dataset, device, hidden)

    pyg_direct.enable_unified_device()
    x = x.to("unified")  # new

    seed_loader = torch.utils.data.DataLoader(dataset.train_idx, batch_size=args.batch_size, shuffle=True)
    for epoch in range(1, args.epochs + 1):
        model.train()
        begin, total_loss = time.perf_counter(), 0.0
        for seeds in seed_loader:
            n_id, batch_size, adjs = sampler.sample(seeds)
            rows = x[n_id]  # new; was: x[n_id.cpu()].to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(rows, adjs), y[n_id[:batch_size]])
            loss.backward()
            optimizer.step()
            total_loss += loss.detach() * batch_size
        mean_loss = float(total_loss) / len(dataset.train_idx)
        print(f"epoch {epoch}: loss {mean_loss:.4f}, {time.perf_counter() - begin:.2f} s")

    model.eval()
    predicted = torch.empty_like(dataset.y)
    with torch.no_grad():
        for seeds in torch.arange(dataset.num_nodes).split(1024):
            n_id, _, adjs = sampler.sample(seeds)
            predicted[seeds] = model(x[n_id], adjs).argmax(1).cpu()
    scores = score(predicted, dataset)
    print("accuracy    train    valid     test")
    print(f"GraphSAGE  {scores['train']:6.2%}   {scores['valid']:6.2%}   {scores['test']:6.2%}")
    print(f"MLP        {mlp['train']:6.2%}   {mlp['valid']:6.2%}   {mlp['test']:6.2%}")


if __name__ == "__main__":
    main()
