"""Small odd graphs: the shapes that break samplers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.reference.compress import compress


class Graph(NamedTuple):
    """Edges as PyG lists them, row 0 the sources: int64 or int32 `[2, E]`; and N."""

    edge_index: Tensor
    num_nodes: int

    def in_rows(self) -> tuple[list[int], list[int], list[int]]:
        """(indptr, sources, edge ids) of the in-neighbors of every node, by the reference."""
        sources, targets = self.edge_index.tolist()
        return compress(targets, sources, self.num_nodes)


def make_graph(num_nodes: int, edges: list[tuple[int, int]], dtype: torch.dtype = torch.int64) -> Graph:
    """The graph with these (source, target) pairs."""
    return Graph(torch.tensor(edges, dtype=dtype).reshape(-1, 2).t().contiguous(), num_nodes)


def make_random_graph(num_nodes: int, num_edges: int, seed: int = 0) -> Graph:
    """Skewed in-degrees, unsorted, with parallel edges, self loops and, mostly, isolated nodes."""
    random = np.random.RandomState(seed)
    targets = (random.rand(num_edges) ** 3 * num_nodes).astype(np.int64)
    sources = random.randint(0, num_nodes, num_edges)
    return Graph(torch.from_numpy(np.stack([sources, targets])), num_nodes)


GRAPHS = {
    "empty": make_graph(0, []),
    "isolated": make_graph(5, []),
    "one node": make_graph(1, []),
    "one loop": make_graph(1, [(0, 0)]),
    "self loops": make_graph(4, [(0, 0), (1, 0), (1, 1), (1, 1), (2, 1), (3, 3)]),
    "parallel": make_graph(3, [(1, 0)] * 9 + [(2, 0)] + [(0, 1)] * 4),
    "trailing": make_graph(40, [(1, 0), (0, 1), (2, 1)]),
    "hub": make_graph(90, [(node, 0) for node in range(1, 90)] + [(0, node) for node in range(1, 90)]),
    "unsorted int32": make_graph(6, [(5, 3), (0, 4), (2, 3), (5, 0), (1, 3), (3, 5), (4, 3)], torch.int32),
    "random": make_random_graph(70, 600),
}


@st.composite
def odd_graphs(draw: st.DrawFn) -> Graph:
    """Up to 20 nodes and 60 edges: repeats, loops and isolated nodes as they come; ids of either dtype."""
    num_nodes = draw(st.integers(0, 20))
    node = st.integers(0, max(num_nodes - 1, 0))
    edges = draw(st.lists(st.tuples(node, node), max_size=60)) if num_nodes else []
    return make_graph(num_nodes, edges, draw(st.sampled_from([torch.int64, torch.int32])))
