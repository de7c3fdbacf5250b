"""Batches in places of fixed size."""


def place_nodes(nodes, node_places):
    """Place of each node of a batch."""
    out, first = [], 0
    for count, places in zip(nodes, node_places, strict=True):
        out += range(first, first + count)
        first += places
    return out


def pad_edges(row, target, nodes, edges, node_places, edge_places, targets=None):
    """(source, target) of each place, None for those that no edge takes."""
    of_node, out, first = place_nodes(nodes, node_places), [], 0
    of_target = of_node if targets is None else place_nodes(*targets)
    for count, places in zip(edges, edge_places, strict=True):
        hop = list(zip(row[first : first + count], target[first : first + count], strict=True))
        out += [(of_node[source], of_target[end]) for source, end in hop] + [None] * (places - count)
        first += count
    return out
