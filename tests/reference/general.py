"""PyG's sampler for any number of node types and relations, one edge after the other.

A graph is a `Parts`; edges, times and weights are lists by edge id. Trees are distinguished by the number of their
seed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

from tests.reference.draw import draw, hop_key
from tests.reference.labor import pick_places
from tests.reference.neighbor import pick_neighbors

# Slots of the draws that give relations and trees keys of their own.
RELATION, TREE = 2**62, 2**62 + 1


@dataclass
class Parts:
    """Nodes by type; (source, target) pairs by (source type, name, target type)."""

    num_nodes: dict
    edges: dict
    node_time: dict = field(default_factory=dict)
    edge_time: dict = field(default_factory=dict)
    edge_weight: dict = field(default_factory=dict)
    direction: str = "in"
    # (source, target) pairs by relation whose edges are not picked.
    excluded: dict = field(default_factory=dict)


@dataclass
class Options:
    replace: bool = False
    disjoint: bool = False
    subgraph_type: str = "directional"
    temporal_strategy: str = "uniform"
    time_comparison: str = "<="
    time_window: int | None = None
    seed_windows: bool = False
    sampling: str = "uniform"
    layer_dependency: bool = False


@dataclass
class Output:
    """As the package's `GeneralSample`, in lists."""

    node: dict
    row: dict
    col: dict
    edge: dict
    batch: dict | None
    num_sampled_nodes: dict | None
    num_sampled_edges: dict | None


def ends_of(graph, edge_type):
    """(type expanded, type reached)."""
    return (edge_type[2], edge_type[0]) if graph.direction == "in" else (edge_type[0], edge_type[2])


def list_row(graph, edge_type, node):
    """[(neighbor, edge id, time or None)] of a node, in the order of time, then of the list."""
    row = []
    for edge, (source, target) in enumerate(graph.edges[edge_type]):
        own, neighbor = (target, source) if graph.direction == "in" else (source, target)
        if own == node and (source, target) not in graph.excluded.get(edge_type, ()):
            reached = ends_of(graph, edge_type)[1]
            time = None
            if edge_type in graph.edge_time:
                time = graph.edge_time[edge_type][edge]
            elif reached in graph.node_time:
                time = graph.node_time[reached][neighbor]
            row.append((neighbor, edge, time))
    return sorted(row, key=lambda item: 0 if item[2] is None else item[2])


def is_allowed(time, seed_time, options):
    if time is None:
        return True
    if options.seed_windows:
        earliest, seed_time = seed_time
        if time < earliest:
            return False
    if options.time_window is not None and time <= seed_time - options.time_window:
        return False
    return time < seed_time if options.time_comparison == "<" else time <= seed_time


def draw_unit(key, item, slot):
    return (draw(key, item, slot) // 2**12 + 0.5) / 2**52


def pick_weighted(weights, node, fanout, key, replace):
    """Places picked among edges of these weights."""
    positive = [place for place, weight in enumerate(weights) if weight > 0]
    if fanout < 0 or (fanout >= len(weights) and not replace):
        return list(range(len(weights)))
    if not positive or fanout == 0:
        return []
    # Without a smallest or a largest number.
    weights = [Fraction(weight) for weight in weights]
    if not replace:
        scores = [(Fraction(-math.log(draw_unit(key, node, place))) / weights[place], place) for place in positive]
        return [place for _, place in sorted(scores)[:fanout]]
    before = [sum(weights[:place]) for place in range(len(weights))]
    wanted = [Fraction(draw_unit(key, node, slot)) * sum(weights) for slot in range(fanout)]
    return [max(place for place in positive if before[place] <= value) for value in wanted]


def pick_edges(graph, edge_type, node, tree, fanout, key, hop, seed_time, options):
    """[(neighbor, edge id)] that a node picks in a relation."""
    row = [item for item in list_row(graph, edge_type, node) if is_allowed(item[2], seed_time, options)]
    is_timed = edge_type in graph.edge_time or ends_of(graph, edge_type)[1] in graph.node_time
    if is_timed and options.temporal_strategy == "last" and fanout >= 0:
        row = row[max(len(row) - fanout, 0) :]
    own_key, relation = hop_key(key, hop), list(graph.edges).index(edge_type)
    if relation > 0:
        own_key = draw(own_key, relation, RELATION)
    if tree is not None:
        own_key = draw(own_key, tree, TREE)
    if options.sampling == "labor":
        kind = list(graph.num_nodes).index(ends_of(graph, edge_type)[1])
        places = pick_places([neighbor for neighbor, _, _ in row], fanout, key, hop, options.layer_dependency, kind)
    elif edge_type in graph.edge_weight:
        weights = [graph.edge_weight[edge_type][edge] for _, edge, _ in row]
        places = pick_weighted(weights, node, fanout, own_key, options.replace)
    else:
        places = pick_neighbors(len(row), node, fanout, own_key, options.replace)
    return [row[place][:2] for place in places]


def sample(graph, seeds, fanouts, key, options=None, seed_time=None):
    """The batch of `seeds` ({type: [node]}); `fanouts` is {relation: [fanout by hop]}."""
    options = options or Options()
    is_temporal = bool(graph.node_time or graph.edge_time)
    disjoint = options.disjoint or is_temporal
    nodes = {kind: [] for kind in graph.num_nodes}
    times = []
    for kind, ids in seeds.items():
        for place, node in enumerate(ids):
            nodes[kind].append((len(times) if disjoint else None, node))
            if is_temporal:
                times.append(seed_time[kind][place] if seed_time else graph.node_time[kind][node])
            else:
                times.append(None)
    num_hops = max((len(row) for row in fanouts.values()), default=0)
    edges = {edge_type: [] for edge_type in graph.edges}
    num_nodes = {kind: [len(ids)] for kind, ids in nodes.items()}
    num_edges = {edge_type: [] for edge_type in graph.edges}
    begins = dict.fromkeys(nodes, 0)
    for hop in range(num_hops):
        met = {kind: set() for kind in nodes}
        ends = {kind: len(ids) for kind, ids in nodes.items()}
        picked = {edge_type: [] for edge_type in graph.edges}
        for edge_type in graph.edges:
            expanded, reached = ends_of(graph, edge_type)
            for place in range(begins[expanded], ends[expanded]):
                tree, node = nodes[expanded][place]
                time = times[tree] if is_temporal else None
                for neighbor, edge in pick_edges(graph, edge_type, node, tree, fanouts[edge_type][hop], key, hop, time,
                                                 options):  # fmt: skip
                    picked[edge_type].append(((tree, neighbor), place, edge))
                    met[reached].add((tree, neighbor))
        for kind, found in met.items():
            new = sorted(found - set(nodes[kind]))
            nodes[kind] += new
            num_nodes[kind].append(len(new))
        places = {kind: {} for kind in nodes}
        for kind, ids in nodes.items():
            for place, node in enumerate(ids):
                # A node that is met again stands at its first place.
                places[kind].setdefault(node, place)
        for edge_type, found in picked.items():
            reached = ends_of(graph, edge_type)[1]
            edges[edge_type] += [(places[reached][source], target, edge) for source, target, edge in found]
            num_edges[edge_type].append(len(found))
        begins = ends
    if options.subgraph_type == "induced":
        edges = induce(graph, nodes, times, options)
        num_nodes = num_edges = None
    forward = graph.direction == "in"
    return Output(
        node={kind: [node for _, node in ids] for kind, ids in nodes.items()},
        row={t: [source if forward else target for source, target, _ in e] for t, e in edges.items()},
        col={t: [target if forward else source for source, target, _ in e] for t, e in edges.items()},
        edge={t: [edge for _, _, edge in e] for t, e in edges.items()},
        batch={kind: [tree for tree, _ in ids] for kind, ids in nodes.items()} if disjoint else None,
        num_sampled_nodes=num_nodes,
        num_sampled_edges=num_edges,
    )


def induce(graph, nodes, times, options):
    """All allowed edges among the nodes, as (local neighbor, local node expanded, edge id)."""
    edges = {}
    for edge_type in graph.edges:
        expanded, reached = ends_of(graph, edge_type)
        edges[edge_type] = [
            (nodes[reached].index((tree, neighbor)), place, edge)
            for place, (tree, node) in enumerate(nodes[expanded])
            for neighbor, edge, time in list_row(graph, edge_type, node)
            if is_allowed(time, None if tree is None else times[tree], options) and (tree, neighbor) in nodes[reached]
        ]
    return edges
