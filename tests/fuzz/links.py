"""Batches around links of a `Data` or a `HeteroData`, with negatives and without the links themselves."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch_geometric.sampler import NegativeSampling

from pyg_direct import LinkLoader, LinkNeighborLoader
from pyg_direct.sampler import NeighborSampler
from tests.fuzz.graphs import LINKS, to_edge_index
from tests.fuzz.neighbors import (
    PLAIN,
    SAMPLING_RULES,
    check_parts,
    draw_fanouts,
    draw_graph,
    draw_times,
    expect_sample,
    expect_times,
    name_times,
    sampling_arguments,
    sampling_options,
)
from tests.fuzz.space import Row, Space
from tests.fuzz.ways import RANKS, loading_options, read_loading, read_topology, run_epochs, same, topology_options
from tests.reference.bidirectional import find_reverse
from tests.reference.general import Output, Parts
from tests.reference.negative import draw_negatives, list_avoided

AMOUNTS = {"one": 1, "half": 0.5, "three": 3}


def space(device: str) -> Space:
    """The options of this subject."""
    options = {
        **sampling_options(), "via": ("LinkNeighborLoader", "LinkLoader"),
        "links": ("all", "some", "repeated", "nobody"),
        "negatives": ("none", "binary", "triplet"), "amount": tuple(AMOUNTS), "strict": ("no", "yes"),
        "end_weights": ("none", "source", "both"), "exclude": ("no", "yes", "reverse"), "labels": ("no", "two", "four"),
        "ranks": tuple(RANKS), **topology_options(device), **loading_options(device),
    }  # fmt: skip
    rules = (
        *SAMPLING_RULES,
        (("negatives", "labels"), lambda mode, labels: mode != "triplet" or labels == "no"),
        *((("negatives", name), lambda mode, value, without=without: mode != "none" or value == without)
          for name, without in (("amount", "one"), ("strict", "no"), ("end_weights", "none"))),
        (("negatives", "amount"), lambda mode, amount: mode != "triplet" or amount != "half"),
        *((("topology_cache", name), lambda cache, found, needed=needed: cache == "none" or found == needed)
          for name, needed in PLAIN.items() if name != "via"),
        (("topology_cache", "exclude"), lambda cache, exclude: cache == "none" or exclude == "no"),
        (("topology_cache", "via"), lambda cache, via: cache == "none" or via == "LinkNeighborLoader"),
        (("leave",), lambda leave: leave != "call"),
        (("ranks", "leave"), lambda ranks, leave: ranks == "none" or leave != "resume"),
    )  # fmt: skip
    return Space(options, rules)


def unite_seeds(kinds: list[str], lists: list[list[int]], own: list[list[int]], disjoint: bool
                ) -> tuple[dict[str, list[int]], dict[str, list[int]], list[list[int]]]:  # fmt: skip
    """(seeds by type, the link that each belongs to, places of each end among the seeds of its type)."""
    ends = list(zip(kinds, lists, own, strict=True))
    seeds: dict[str, list[int]] = {}
    owners: dict[str, list[int]] = {}
    for kind, ids, links in ends:
        seeds[kind], owners[kind] = seeds.get(kind, []) + ids, owners.get(kind, []) + links
    if disjoint:
        starts = dict.fromkeys(kinds, 0)
        places = []
        for kind, ids, _ in ends:
            places.append(list(range(starts[kind], starts[kind] + len(ids))))
            starts[kind] += len(ids)
        return seeds, owners, places
    seeds = {kind: sorted(set(ids)) for kind, ids in seeds.items()}
    return seeds, owners, [[seeds[kind].index(node) for node in ids] for kind, ids, _ in ends]


def list_ways(row: Row, relation: tuple, graph: Parts, reverse: tuple | None) -> list[tuple[tuple, bool]]:
    """(relation, whether the other way) that links are taken out of; `reverse` is named by the user."""
    if row["exclude"] == "no":
        return []
    ways = [(relation, False)]
    if row["subgraph"] == "bidirectional":
        ways += [(kind, True) for kind in graph.edges if find_partner(kind, graph) == relation
                 or find_partner(relation, graph) == kind]  # fmt: skip
    if row["exclude"] == "reverse":
        ways += [(kind, True) for kind in find_named(relation, graph) or [reverse] if kind is not None]
    return ways


def find_partner(relation: tuple, graph: Parts) -> tuple | None:
    """The relation whose edges stand beside those of another in both directions."""
    return None if relation[1].startswith("rev_") else find_reverse(relation, list(graph.edges))


def find_named(relation: tuple, graph: Parts) -> list[tuple]:
    """The relations of the reverse edges of a link, as far as names and edges tell."""
    source, name, target = relation
    turned = {(b, a) for a, b in graph.edges[relation]}
    for reverse in (f"rev_{name}", name.removeprefix("rev_")):
        named = target, reverse, source
        if named in graph.edges and reverse != name:
            return [named, *(kind for kind, pairs in graph.edges.items() if kind not in (named, relation)
                             and (kind[0], kind[2]) == (target, source) and set(pairs) == turned)]  # fmt: skip
    return [kind for kind, pairs in graph.edges.items() if (kind[0], kind[2]) == (target, source)
            and (kind == relation or set(pairs) == turned)]  # fmt: skip


def run(row: Row, random: Random, device: str, hold: Callable[[Any], Any] = same, wrap: Callable[[Any], Any] = same
        ) -> int:  # fmt: skip
    """Check the batches of a loader; `hold` and `wrap` as in `neighbors.run`."""
    graph, data = draw_graph(row, random)
    num_neighbors, fanouts = draw_fanouts(row, random, graph)
    options, arguments = read_loading(row, random, device), sampling_arguments(row)
    options["ranks"], options["uneven"] = RANKS[row["ranks"]]
    settle_attributes(row, graph, data)
    relation = random.choice(list(graph.edges))
    source, _, target = relation
    links = draw_links(row, random, graph, relation)
    is_timed = row["time"] != "none"
    times = draw_times(row, random, len(links)) if is_timed else None
    num_labels = {"no": 0, "two": 2, "four": 4}[row["labels"]]
    labels = [random.randrange(num_labels) for _ in links] if num_labels else None
    weights = draw_weights(row, random, graph.num_nodes[source], graph.num_nodes[target])
    sampling = None
    if row["negatives"] != "none":
        tensors = [None if weight is None else torch.tensor(weight) for weight in weights]
        sampling = NegativeSampling(row["negatives"], AMOUNTS[row["amount"]], *tensors)
    given = None if row["links"] == "all" else to_edge_index(links, getattr(torch, row["ids"]))
    own = {"strict_negatives": row["strict"] == "yes",
           "exclude_target_edges": {"no": False, "yes": True}.get(row["exclude"], row["exclude"])}  # fmt: skip
    back = [kind for kind in graph.edges if (kind[0], kind[2]) == (target, source)]
    # Where nothing tells it must be named.
    is_named = row["exclude"] == "reverse" and row["graph"] != "data" and back and not find_named(relation, graph)
    reverse = random.choice(back) if is_named else None
    own |= {"rev_edge_type": reverse} if is_named else {}
    ways = list_ways(row, relation, graph, reverse)
    held = hold(data)
    # A graph without types in stores is that of the relation None.
    named = given if relation == LINKS else (relation, given)
    named = (None, given) if relation == LINKS and held is not data else named
    inputs = {"edge_label_index": named, "neg_sampling": sampling,
              "edge_label": None if labels is None else torch.tensor(labels, dtype=torch.int64),
              **name_times(row, "edge_label_time", times)}  # fmt: skip

    def make() -> Any:
        return wrap(make_loader())

    def make_loader() -> Any:
        if row["via"] == "LinkLoader":
            sampler = NeighborSampler(held, num_neighbors, device=device,
                                      placement=row["placement"] if row["topology"] == "same" else row["topology"],
                                      **arguments, **own)  # fmt: skip
            return LinkLoader(held, sampler, **inputs, **options)
        return LinkNeighborLoader(held, num_neighbors, **inputs, **arguments, **own, **read_topology(row), **options)

    # Labels of 0 and 1 say which links are negative; others are classes of positive ones.
    positives = [link for link, label in zip(links, labels or [1] * len(links), strict=True)
                 if label or set(labels) != {0, 1}]  # fmt: skip
    if labels and min(labels) == 0 and row["negatives"] == "binary":
        # As in PyG: 0 is the label of negatives.
        labels = [label + 1 for label in labels]

    def check(batch: Any, positions: list[int], key: int) -> None:
        chosen = [links[position] for position in positions]
        until = None if times is None else [times[position] for position in positions]
        excluded: dict[tuple, set] = {}
        for kind, is_turned in ways:
            excluded.setdefault(kind, set()).update((b, a) if is_turned else (a, b) for a, b in chosen)
        out, more = expect(row, replace(graph, excluded=excluded), relation, chosen, until, weights, fanouts, key,
                           positives)  # fmt: skip
        more.setdefault(relation, {})["input_id"] = positions
        if labels is not None:
            own_labels = [labels[position] for position in positions]
            num_negatives = len(more[relation].pop("edge_label")) - len(positions) if sampling is not None else 0
            more[relation]["edge_label"] = own_labels + [0] * num_negatives
        check_parts(batch, data, out, more)

    return run_epochs(make, row, random, len(links), options, check)


def settle_attributes(row: Row, graph: Parts, data: Any) -> None:
    """Where chance left all types and relations without times or weights, one has them."""
    if row["graph"] == "data":
        return
    kind, relation = "a", next(iter(graph.edges))
    if row["time"] == "node" and not graph.node_time:
        graph.node_time[kind] = [0] * graph.num_nodes[kind]
        data[kind].time = torch.tensor(graph.node_time[kind])
    if row["time"] == "edge" and not graph.edge_time:
        graph.edge_time[relation] = [0] * len(graph.edges[relation])
        data[relation].when = torch.tensor(graph.edge_time[relation], dtype=torch.int64)
    if row["weight"] == "yes" and not graph.edge_weight:
        graph.edge_weight[relation] = [1.0] * len(graph.edges[relation])
        data[relation].weight = torch.tensor(graph.edge_weight[relation])


def draw_links(row: Row, random: Random, graph: Parts, relation: tuple) -> list[tuple[int, int]]:
    """Edges of a relation, or pairs that may be none."""
    edges = graph.edges[relation]
    if row["links"] == "all":
        return edges
    if row["links"] == "some":
        return random.sample(edges, len(edges) // 2)
    ends = [range(graph.num_nodes[kind]) for kind in (relation[0], relation[2])]
    return [(random.choice(ends[0]), random.choice(ends[1])) for _ in range(24 if row["links"] == "repeated" else 0)]


def draw_weights(row: Row, random: Random, num_sources: int, num_targets: int) -> list[list[float] | None]:
    """Weights of the ends of negatives."""
    weights = [[1.0, *(random.choice([0.0, 0.5, 4.0]) for _ in range(size - 1))] for size in (num_sources, num_targets)]
    kind = row["end_weights"]
    return [weights[0] if kind != "none" else None, weights[1] if kind == "both" else None]


def expect(row: Row, graph: Parts, relation: tuple, links: list[tuple[int, int]], times: list[Any] | None,
           weights: list[Any], fanouts: dict, key: int, positives: list[tuple[int, int]]
           ) -> tuple[Output, dict[Any, dict[str, Any]]]:  # fmt: skip
    """(what is sampled around links and their negatives, what the loader says of them)."""
    source, _, target = relation
    count, mode = len(links), row["negatives"]
    sources, targets = [s for s, _ in links], [t for _, t in links]
    num_negatives = 0 if mode == "none" else math.ceil(count * AMOUNTS[row["amount"]])
    owners = [number % count for number in range(num_negatives)]
    latest = None if times is None else expect_times(row, "time", times)["time"]
    has_times = row["time"] == "node" and bool({source, target} & graph.node_time.keys())
    drawn = draw_negatives(
        num_negatives, key, graph.num_nodes[source], graph.num_nodes[target],
        sources=[sources[owner] for owner in owners] if mode == "triplet" else None,
        time=(graph.node_time.get(source), graph.node_time.get(target)) if has_times else None,
        until=[latest[owner] for owner in owners] if has_times and latest is not None else None,
        weight=tuple(weights),
        edges=list_avoided(graph.edges[relation], positives, source == target) if row["strict"] == "yes" else None,
    )  # fmt: skip
    own = list(range(count))
    targets, target_owners = targets + [t for _, t in drawn], own + owners
    source_owners = own
    if mode == "binary":
        sources, source_owners = sources + [s for s, _ in drawn], own + owners
    disjoint = row["disjoint"] == "yes" or row["time"] != "none"
    seeds, by_kind, places = unite_seeds([source, target], [sources, targets], [source_owners, target_owners], disjoint)
    until_of = None if times is None else {kind: [times[owner] for owner in ids] for kind, ids in by_kind.items()}
    out = expect_sample(row, graph, seeds, fanouts, key, until_of)
    if out.batch is not None:
        owner_of_tree = [owner for ids in by_kind.values() for owner in ids]
        out.batch = {kind: [owner_of_tree[tree] for tree in trees] for kind, trees in out.batch.items()}
    more: dict[Any, dict[str, Any]] = {}
    if mode == "triplet":
        amount = len(targets) // count - 1 if count else 1
        negatives = [[places[1][count + n * count + link] for n in range(amount)] for link in range(count)]
        told = expect_times(row, "seed_time", times)
        more.setdefault(source, {}).update(src_index=places[0], **told)
        more.setdefault(target, {}).update(
            dst_pos_index=places[1][:count], **told,
            dst_neg_index=[own[0] for own in negatives] if amount == 1 else negatives)  # fmt: skip
        return out, more
    more[relation] = {"edge_label_index": [places[0], places[1]]}
    if times is not None:
        more[relation].update(expect_times(row, "edge_label_time", [times[owner] for owner in source_owners]))
    if mode == "binary":
        more[relation]["edge_label"] = torch.tensor([1.0] * count + [0.0] * num_negatives)
    return out, more
