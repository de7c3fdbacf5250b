"""Snapshots for tests: random ones that change a little from one to the next, and hypothesis' own."""

import numpy as np
import torch
from hypothesis import strategies as st

from pyg_direct.dynamic.snapshot import order_edges


def make_snapshots(num_nodes=12, num_edges=40, count=4, change=0.2, weighted=False, seed=0, hub=False):
    """(edge_index [2, E], weight [E] or None) of each snapshot, unsorted, with parallel edges and loops."""
    random = np.random.default_rng(seed)
    edges = random.integers(0, num_nodes, (2, num_edges))
    if hub:
        edges[1, : num_edges // 2] = 3
    weight = random.integers(1, 5, num_edges).astype(np.float32) / 2
    out = []
    for _ in range(count):
        changed = random.random(num_edges) < change
        edges = edges.copy()
        edges[:, changed] = random.integers(0, num_nodes, (2, int(changed.sum())))
        order = random.permutation(num_edges)
        out.append((edges[:, order], weight[order] if weighted else None))
    return out


def order_snapshots(snapshots, num_nodes, device="cpu"):
    return [
        order_edges(torch.from_numpy(e).to(device), None if w is None else torch.from_numpy(w).to(device), num_nodes)
        for e, w in snapshots
    ]


@st.composite
def drawn_snapshots(draw):
    """(num_nodes, snapshots): empty ones, loops, parallel edges, some with weights and some without."""
    num_nodes = draw(st.integers(1, 7))
    node = st.integers(0, num_nodes - 1)
    snapshots = []
    for _ in range(draw(st.integers(1, 8))):
        pairs = draw(st.lists(st.tuples(node, node), max_size=12))
        edge_index = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        weight = None
        if draw(st.booleans()):
            values = st.sampled_from([0.5, 1.0, 2.0, 3.0])
            weight = np.array(draw(st.lists(values, min_size=len(pairs), max_size=len(pairs))), dtype=np.float32)
        snapshots.append((edge_index, weight))
    return num_nodes, snapshots
