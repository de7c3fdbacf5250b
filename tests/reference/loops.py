"""A loop for each target, and the weights that GCN gives edges."""

import math


def add_loops(edges, num_targets):
    """Edges (source, target) of each target in their order, its loop behind them."""
    return [
        edge
        for t in range(num_targets)
        for edge in [*((source, target) for source, target in edges if target == t), (t, t)]
    ]


def weigh(edges, num_targets, looped):
    """Weights of `looped`: loops of `edges` have weight 0, and each target has one loop."""
    degree = [1 + sum(target == t and source != t for source, target in edges) for t in range(num_targets)]

    def scale(node):
        return 1 / math.sqrt(degree[node] if node < num_targets else 1)

    is_last = [i + 1 == len(looped) or looped[i + 1][1] != looped[i][1] for i in range(len(looped))]
    return [0.0 if source == target and not last else scale(source) * scale(target)
            for (source, target), last in zip(looped, is_last, strict=True)]  # fmt: skip
