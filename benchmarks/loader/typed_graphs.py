"""Random graphs with types, times and weights for measurements: only their shape matters, not their content."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.data import HeteroData

# Times are days of about three years, as in tables of transactions.
LAST_DAY = 1000


def make_mag(scale: float, device: str | torch.device, num_features: int = 0) -> HeteroData:
    """Make a graph of ogbn-mag's sizes with 3 node types and 4 relations, with skewed degrees.

    Args:
        scale: Factor on nodes and edges.
        device: Device of the graph.
        num_features: Width of `x` of each type; 0 leaves it out.
    """
    sizes = {"paper": 736_389, "author": 1_134_649, "field": 59_965}
    relations = {
        ("author", "writes", "paper"): 7_145_660,
        ("paper", "rev_writes", "author"): 7_145_660,
        ("paper", "cites", "paper"): 5_416_271,
        ("field", "topic_of", "paper"): 7_505_078,
    }
    return _draw(sizes, relations, scale, device, num_features)


def make_tables(scale: float, device: str | torch.device, num_features: int = 0) -> HeteroData:
    """Make a relational database: 5 tables of entities and 5 of events, with times; 30 relations.

    Every row of an event refers to three entities, each a relation in both directions. Entities exist from the first
    tenth of the time on, events are spread over all of it.

    Args:
        scale: Factor on nodes and edges.
        device: Device of the graph.
        num_features: Width of `x` of each type; 0 leaves it out.
    """
    entities = {"country": 5_000, "product": 12_500, "shop": 25_000, "user": 50_000, "device": 100_000}
    events = {"visit": 750_000, "order": 500_000, "review": 375_000, "ticket": 250_000, "refund": 125_000}
    keys = {(event, f"of_{entity}", entity): events[event] for number, event in enumerate(events)
            for entity in [list(entities)[(number + step) % 5] for step in range(3)]}  # fmt: skip
    relations = {}
    for (event, name, entity), count in keys.items():
        relations[event, name, entity] = relations[entity, f"rev_{name}", event] = count
    data = _draw({**entities, **events}, relations, scale, device, num_features)
    generator = torch.Generator(device).manual_seed(1)
    for kind, store in data.node_items():
        last = LAST_DAY // 10 if kind in entities else LAST_DAY
        store.time = torch.randint(last, (store.num_nodes,), generator=generator, device=device)
    for event, name, entity in keys:
        # Each event has one of each.
        edges = data[event, name, entity].edge_index
        edges[0] = torch.arange(edges.shape[1], device=device)
        data[entity, f"rev_{name}", event].edge_index = edges.flip(0)
    return data


def make_relations(count: int, scale: float, device: str | torch.device, num_types: int = 10) -> HeteroData:
    """Make a graph of 300 k nodes and 30 M edges in `count` relations between all pairs of types; one has one type.

    Args:
        count: Relations: a square, of the number of types.
        scale: Factor on nodes and edges.
        device: Device of the graph.
        num_types: Node types if there is more than one relation.
    """
    kinds = [f"type{number}" for number in range(num_types if count > 1 else 1)]
    sizes = dict.fromkeys(kinds, 300_000 // len(kinds))
    pairs = [(source, target) for source in kinds for target in kinds][:count]
    relations = {(s, f"to{number}", t): 30_000_000 // count for number, (s, t) in enumerate(pairs)}
    return _draw(sizes, relations, scale, device, 0)


def _draw(sizes: dict[str, int], relations: dict[tuple[str, str, str], int], scale: float,
          device: str | torch.device, num_features: int) -> HeteroData:  # fmt: skip
    data = HeteroData()
    generator = torch.Generator(device).manual_seed(0)
    for kind, size in sizes.items():
        data[kind].num_nodes = max(1, int(size * scale))
        if num_features > 0:
            data[kind].x = torch.randn(data[kind].num_nodes, num_features, generator=generator, device=device)

    def ends(kind: str, count: int) -> Tensor:
        # Some nodes have three times the mean degree, some a third of it.
        places = torch.rand(count, generator=generator, device=device).pow(1.5)
        num_nodes = int(data[kind].num_nodes)
        return (places * num_nodes).long().clamp(max=num_nodes - 1)

    for (source, name, target), count in relations.items():
        num_edges = max(1, int(count * scale))
        if (target, name.removeprefix("rev_"), source) in data.edge_types and name.startswith("rev_"):
            data[source, name, target].edge_index = data[target, name.removeprefix("rev_"), source].edge_index.flip(0)
        else:
            data[source, name, target].edge_index = torch.stack([ends(source, num_edges), ends(target, num_edges)])
    return data
