"""Hashes of the first shuffled batches of the drop-in loader, to be compared between machines.

    python -m tests.loader.hashes --data FOLDER --device cuda

prints a line for the graph as it was read, one for each of 100 batches drawn as `examples/ogbn_products_sage.py` draws
them, and one for all: equal lines on two machines are equal bytes in every tensor. Without `--data` the graph is
a generated one. `hashes.txt` keeps what a CPU gave.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator
from itertools import chain, islice, repeat
from pathlib import Path

import torch
from torch_geometric.data import Data

from pyg_direct import NeighborLoader
from pyg_direct.datasets import load_folder, synthetic_graph
from tests.batches import hash_batches

NUM_BATCHES = 100
KEPT = Path(__file__).with_name("hashes.txt")


def load_data(folder: str | None) -> tuple[str, Data]:
    """Name and graph: that of a folder, else a generated one whose numbers are equal on every CPU."""
    if folder is not None:
        dataset = load_folder(folder)
        return dataset.name, dataset.to_data()
    dataset = synthetic_graph("products", scale=0.004, topology_only=True)
    data = dataset.to_data()
    # Noise that torch draws differs in its last bits between kinds of CPUs.
    data.x = (torch.arange(dataset.num_nodes)[:, None] * 31 + torch.arange(100) * 7) % 1021 / 8
    return "generated", data


def iterate(data: Data, device: str | torch.device | None, placement: str) -> Iterator[Data]:
    """The first batches of the example's loader, over as many epochs as they take; smaller ones of a small graph."""
    loader = NeighborLoader(data, num_neighbors=[15, 10, 5], input_nodes=data.train_mask,
                            batch_size=min(256, data.num_nodes // 512), shuffle=True, device=device, seed=0,
                            placement=placement)  # fmt: skip
    return islice(chain.from_iterable(repeat(loader)), NUM_BATCHES)


def join(digests: list[str]) -> str:
    """One hash of many."""
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def read_kept() -> dict[str, tuple[str, str]]:
    """Name of a graph -> (hash of the graph, hash of its batches)."""
    lines = [line.split() for line in KEPT.read_text().splitlines() if line and not line.startswith("#")]
    return {name: (graph, batches) for name, graph, batches in lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder with graph.npz and features")
    parser.add_argument("--device", help="the GPU if there is one")
    parser.add_argument("--placement", default="auto")
    args = parser.parse_args()

    name, data = load_data(args.data)
    graph = hash_batches([data])
    print(f"{name} {graph}")
    digests = []
    for number, batch in enumerate(iterate(data, args.device, args.placement)):
        digests.append(hash_batches([batch]))
        print(f"batch {number} {digests[-1]}", flush=True)
    print(f"{name} {graph} {join(digests)}")


if __name__ == "__main__":
    main()
