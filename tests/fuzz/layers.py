"""Batches of the samplers that have rules of their own: HGT, ShaDow, and GraphSAGE layer by layer."""

from __future__ import annotations

from random import Random
from typing import Any

import torch

from pyg_direct import CSRTopo, GraphSageSampler, HGTLoader, ShaDowKHopSampler
from tests.fuzz.compare import assert_equal, assert_store
from tests.fuzz.graphs import LINKS, NODES, make_one_type, make_types, to_data, to_hetero
from tests.fuzz.neighbors import FANOUTS, check_parts, draw_fanouts, draw_seeds, rows_of
from tests.fuzz.space import Row, Space
from tests.fuzz.ways import loading_options, read_loading, run_epochs
from tests.reference import hgt
from tests.reference.compress import compress
from tests.reference.draw import call_key
from tests.reference.general import Options, Output, sample
from tests.reference.sample import sample as sample_plain


def space(device: str) -> Space:
    """The options of this subject."""
    options = {
        "via": ("HGTLoader", "ShaDowKHopSampler", "GraphSageSampler"), "fanout": FANOUTS, "hops": ("1", "2", "3"),
        "replace": ("no", "yes"), "seeds": ("all", "ids", "mask", "repeated", "empty"), "most": ("50", "14", "all"),
        **loading_options(device),
    }  # fmt: skip
    rules = (
        (("via", "replace"), lambda via, replace: via == "ShaDowKHopSampler" or replace == "no"),
        (("via", "most"), lambda via, most: via == "HGTLoader" or most == "50"),
        (("via", "hook"), lambda via, hook: via == "HGTLoader" or hook == "none"),
        (("via", "leave"), lambda via, leave: leave != "call" or via == "GraphSageSampler"),
        (("via", "seeds"), lambda via, seeds: via != "GraphSageSampler" or seeds in ("ids", "repeated", "empty")),
        *((("via", name), lambda via, value, only=only: via != "GraphSageSampler" or value == only)
          for name, only in (("prefetch", "0"), ("store", "none"), ("order", "given"), ("leave", "never"))),
    )  # fmt: skip
    return Space(options, rules)


def run(row: Row, random: Random, device: str) -> int:
    """Check the batches of a loader or sampler."""
    return {"HGTLoader": run_hgt, "ShaDowKHopSampler": run_shadow, "GraphSageSampler": run_sage}[row["via"]](
        row, random, device
    )


def run_hgt(row: Row, random: Random, device: str) -> int:
    """Nodes of each type in order, and the edges among them."""
    graph = make_types(random)
    data = to_hetero(random, graph, getattr(torch, row["ids"]))
    most = {"few": 1, "many": 4, "all": 40, "mixed": 3, "none": 0}[row["fanout"]]
    samples = {kind: [random.randint(min(1, most), most) for _ in range(int(row["hops"]))] for kind in graph.num_nodes}
    kind = random.choice(list(graph.num_nodes))
    given, ids = draw_seeds(row, random, graph.num_nodes[kind])
    options = read_loading(row, random, device)
    names = ids if row["seeds"] == "mask" else list(range(len(ids)))

    def check(batch: Any, positions: list[int], key: int) -> None:
        seeds = {kind: [ids[position] for position in positions]}
        nodes, edges = hgt.sample(graph, seeds, samples, key)
        for name, found in nodes.items():
            assert_equal(f"{name}.n_id", batch[name].n_id, found)
        # In which order a batch lists its edges is left open: expected are its rows for the order that it has.
        listed = {name: zip(*batch[name].edge_index.tolist(), batch[name].e_id.tolist(), strict=True) for name in edges}
        local = {name: [(nodes[name[0]].index(source), place, edge) for source, place, edge in found]
                 for name, found in edges.items()}  # fmt: skip
        in_order = {}
        for name, found in listed.items():
            in_order[name] = list(found)
            assert_equal(f"edges of {name}", sorted(in_order[name]), sorted(local[name]))
        out = Output(nodes, *({name: [edge[part] for edge in found] for name, found in in_order.items()}
                              for part in range(3)), None, None, None)  # fmt: skip
        more = {"input_id": [names[position] for position in positions], "batch_size": len(positions)}
        counts = {name: {"num_sampled_nodes": batch[name].get("num_sampled_nodes")} for name in nodes}
        counts |= {name: {"num_sampled_edges": batch[name].get("num_sampled_edges")} for name in edges}
        counts[kind] |= more
        check_parts(batch, data, out, counts)

    def make() -> Any:
        # Lists are no longer: fewer would be drawn from, which the reference leaves out.
        most = -1 if row["most"] == "all" else int(row["most"])
        return HGTLoader(data, samples, (kind, given), most_neighbors=most, **options)

    return run_epochs(make, row, random, len(ids), options, check)


def run_shadow(row: Row, random: Random, device: str) -> int:
    """A graph for each seed, its nodes ascending."""
    graph = make_one_type(random)
    data = to_data(random, graph, getattr(torch, row["ids"]))
    count = graph.num_nodes[NODES]
    given, ids = draw_seeds(row, random, count)
    depth = 0 if row["fanout"] == "none" else int(row["hops"])
    fanout = {"few": 1, "many": 6, "all": -1, "mixed": 2, "none": 3}[row["fanout"]]
    options = {name: value for name, value in read_loading(row, random, device).items() if "transform" not in name}

    def check(batch: Any, positions: list[int], key: int) -> None:
        seeds = [ids[position] for position in positions]
        rule = Options(row["replace"] == "yes", True, "induced")
        out = sample(graph, {NODES: seeds}, {LINKS: [fanout] * depth}, key, rule)
        found = list(zip(out.batch[NODES], out.node[NODES], strict=True))
        order = sorted(range(len(found)), key=lambda place: found[place])
        place_of = {old: new for new, old in enumerate(order)}
        edges = sorted(((place_of[row], place_of[col], edge) for row, col, edge in
                        zip(out.row[LINKS], out.col[LINKS], out.edge[LINKS], strict=True)),
                       key=lambda edge: edge[:2])  # fmt: skip
        nodes, roots = [found[old][1] for old in order], [place_of[seed] for seed in range(len(seeds))]
        sizes = [sum(tree == seed for tree, _ in found) for seed in range(len(seeds))]
        edge_ids = [edge for _, _, edge in edges]
        expected = {
            **rows_of(data, nodes, ("edge_index", "num_nodes", "edge_attr")),
            **rows_of(data, edge_ids, ("edge_index", "num_nodes", "x", "y")), "y": data.y[torch.tensor(seeds).long()],
            "edge_index": [[source for source, _, _ in edges], [target for _, target, _ in edges]],
            "num_nodes": len(nodes), "batch": [found[old][0] for old in order], "n_id": nodes, "e_id": edge_ids,
            "ptr": [sum(sizes[:end]) for end in range(len(seeds) + 1)], "root_n_id": roots,
        }  # fmt: skip
        assert_store("batch", batch, expected)

    def make() -> Any:
        return ShaDowKHopSampler(data, depth, fanout, given, row["replace"] == "yes", **options)

    return run_epochs(make, row, random, len(ids), options, check)


def run_sage(row: Row, random: Random, device: str) -> int:
    """Layers that expand all nodes so far."""
    graph = make_one_type(random)
    data = to_data(random, graph, getattr(torch, row["ids"]))
    sizes, _ = draw_fanouts({**row, "fanout_by": "hop"}, random, graph)
    mode = {"auto": "auto", "cpu": "CPU", "cuda": "GPU"}.get(row["placement"], "UVA")
    seed, count = random.getrandbits(64), graph.num_nodes[NODES]
    sampler = GraphSageSampler(CSRTopo(data.edge_index, num_nodes=count), sizes, device, mode, seed=seed)
    rows = compress([target for _, target in graph.edges[LINKS]], [source for source, _ in graph.edges[LINKS]], count)
    calls = 4 * int(row["epochs"])
    for call in range(calls):
        given, ids = draw_seeds(row, random, count)
        expected = sample_plain(rows, ids, sizes, call_key(seed, call), expand_all=True)
        n_id, batch_size, adjs = sampler.sample(random.choice([given, ids]))
        assert_equal("n_id", n_id, expected.n_id)
        assert_equal("batch_size", batch_size, len(ids))
        assert len(adjs) == len(sizes)
        for hop, adj in enumerate(reversed(adjs)):
            part = slice(expected.edge_counts[hop], expected.edge_counts[hop + 1])
            assert_equal("edge_index", adj.edge_index, [ends[part] for ends in expected.edge_index])
            assert_equal("e_id", adj.e_id, expected.e_id[part])
            assert_equal("size", adj.size, (expected.node_counts[hop + 1], expected.node_counts[hop]))
    return calls
