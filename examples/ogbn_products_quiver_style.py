"""Train GraphSAGE from the pieces, in Quiver's three steps: topology, sampler, feature.

    python examples/ogbn_products_quiver_style.py

takes its data as `ogbn_products_sage.py` does.
"""

import argparse
import time
from itertools import pairwise

import torch
import torch.nn.functional as F
from model import describe, load_dataset, score, train_mlp
from torch_geometric.nn import SAGEConv
from tqdm import tqdm

from pyg_direct import CSRTopo, Feature, GraphSageSampler


class SAGE(torch.nn.Module):
    """GraphSAGE over bipartite layers, as PyG's `NeighborSampler` examples write it."""

    def __init__(self, num_features: int, hidden: int, num_classes: int, num_layers: int) -> None:
        super().__init__()
        widths = [num_features, *[hidden] * (num_layers - 1), num_classes]
        self.convs = torch.nn.ModuleList(SAGEConv(a, b) for a, b in pairwise(widths))

    def forward(self, x: torch.Tensor, adjs: list) -> torch.Tensor:
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
    parser.add_argument("--mode", default="auto", help="GPU, UVA, CPU or auto")
    parser.add_argument("--cache", default="20%", help="GPU memory for hot rows")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
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
    model = SAGE(dataset.num_features, hidden, dataset.num_classes, num_layers=3).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    y = dataset.y.to(device)

    seed_loader = torch.utils.data.DataLoader(dataset.train_idx, batch_size=args.batch_size, shuffle=True)
    for epoch in range(1, args.epochs + 1):
        model.train()
        begin, total_loss = time.perf_counter(), 0.0
        for seeds in tqdm(seed_loader, desc=f"epoch {epoch}", leave=False):
            n_id, batch_size, adjs = sampler.sample(seeds)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(feature[n_id], adjs), y[n_id[:batch_size]])
            loss.backward()
            optimizer.step()
            total_loss += loss.detach() * batch_size
        mean_loss = float(total_loss) / len(dataset.train_idx)
        print(f"epoch {epoch}: loss {mean_loss:.4f}, {time.perf_counter() - begin:.2f} s")

    model.eval()
    predicted = torch.empty_like(dataset.y)
    with torch.no_grad():
        for seeds in tqdm(torch.arange(dataset.num_nodes).split(1024), desc="evaluating", leave=False):
            n_id, _, adjs = sampler.sample(seeds)
            predicted[seeds] = model(feature[n_id], adjs).argmax(1).cpu()
    scores, mlp = score(predicted, dataset), train_mlp(dataset, device, hidden)
    print("accuracy    train    valid     test")
    print(f"GraphSAGE  {scores['train']:6.2%}   {scores['valid']:6.2%}   {scores['test']:6.2%}")
    print(f"MLP        {mlp['train']:6.2%}   {mlp['valid']:6.2%}   {mlp['test']:6.2%}")


if __name__ == "__main__":
    main()
