"""Batches around nodes of a `Data` or a `HeteroData`, by every loader and sampler of neighbors."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch

from pyg_direct import NeighborLoader, NodeLoader, SubGraphLoader
from pyg_direct.sampler import NeighborSampler
from tests.fuzz.compare import assert_store
from tests.fuzz.graphs import NODES, make_one_type, make_types, sort_by_end, to_data, to_hetero
from tests.fuzz.space import Row, Space
from tests.fuzz.ways import RANKS, loading_options, read_loading, read_topology, run_epochs, same, topology_options
from tests.reference.bidirectional import make_bidirectional
from tests.reference.draw import call_key
from tests.reference.general import Options, Output, Parts, sample

# The last: each seed has one of its own.
NO_WINDOW, WINDOW, OWN_WINDOWS = "none", "3", "own"
FANOUTS = ("few", "many", "all", "mixed", "none")


# What the captured plan of a homogeneous graph makes batches of; some options need it.
PLAIN = {"graph": "data", "via": "NeighborLoader", "time": "none", "weight": "no", "disjoint": "no",
         "subgraph": "directional", "fanout_by": "hop"}  # fmt: skip
NEED_PLAIN = {"topology_cache": "none"}


def sampling_options() -> dict[str, tuple[str, ...]]:
    """Options of sampling neighbors, by nodes or by links."""
    return {
        "graph": ("data", "hetero"), "replace": ("no", "yes"), "disjoint": ("no", "yes"),
        "subgraph": ("directional", "bidirectional", "induced"), "time": ("none", "node", "edge"),
        "strategy": ("uniform", "last"), "compare": ("<=", "<"), "window": (NO_WINDOW, WINDOW, OWN_WINDOWS),
        "weight": ("no", "yes"), "fanout": FANOUTS, "fanout_by": ("hop", "relation"), "hops": ("1", "2", "3"),
        "reverses": ("yes", "no"), "sorted": ("no", "yes"), "sampling": ("uniform", "labor", "layers"),
    }  # fmt: skip


# What PyG and we refuse, and what would say the same twice.
SAMPLING_RULES = (
    *(
        (("time", name), lambda time, value, without=without: time != "none" or value == without)
        for name, without in (("window", NO_WINDOW), ("compare", "<="), ("strategy", "uniform"))
    ),
    (("graph", "fanout_by"), lambda graph, by: graph == "hetero" or by == "hop"),
    (("graph", "reverses"), lambda graph, reverses: graph == "hetero" or reverses == "yes"),
    (("time", "sorted"), lambda time, ordered: time != "none" or ordered == "no"),
    *(
        ((name, "sampling"), lambda value, sampling: sampling == "uniform" or value == "no")
        for name in ("replace", "weight")
    ),
)


def space(device: str) -> Space:
    """The options of this subject."""
    options = {
        **sampling_options(), "via": ("NeighborLoader", "NodeLoader", "SubGraphLoader"),
        "direction": ("forward", "backward"),
        "input_time": ("own", "given"), "seeds": ("all", "ids", "mask", "repeated", "empty"),
        "hotness": ("expected", "degree", "frequency"), "presample": ("none", "0.5", "2"),
        "super_batch": ("1", "3"), "ranks": tuple(RANKS), "input_id": ("none", "given"),
        **topology_options(device), **loading_options(device),
    }  # fmt: skip
    rules = (
        *SAMPLING_RULES,
        (("via", "subgraph"), lambda via, kind: via != "SubGraphLoader" or kind == "induced"),
        (("via", "direction"), lambda via, direction: via == "NodeLoader" or direction == "forward"),
        (("time", "direction"), lambda time, direction: time == "none" or direction == "forward"),
        # Edges tell nothing of the times of seeds.
        (("window", "input_time"), lambda window, given: window != OWN_WINDOWS or given == "given"),
        (("time", "input_time"), lambda time, given: given == {"none": "own", "edge": "given"}.get(time, given)),
        *(((name, other), lambda value, found, without=without, needed=needed: value == without or found == needed)
          for name, without in NEED_PLAIN.items() for other, needed in PLAIN.items()),
        *((("hotness", other), lambda hotness, found, needed=needed: hotness != "frequency" or found == needed)
          for other, needed in PLAIN.items()),
        (("hotness", "via"), lambda hotness, via: hotness == "expected" or via == "NeighborLoader"),
        (("hotness", "sampling"), lambda hotness, sampling: hotness != "frequency" or sampling == "uniform"),
        (("hotness", "presample"), lambda hotness, presample: hotness == "frequency" or presample == "none"),
        (("ranks", "leave"), lambda ranks, leave: ranks == "none" or leave != "resume"),
    )  # fmt: skip
    return Space(options, rules)


def draw_graph(row: Row, random: Random) -> tuple[Parts, Any]:
    """The graph as lists and as PyG's data."""
    dtype, times = getattr(torch, row["ids"]), "" if row["time"] == "none" else row["time"]
    ordered = row.get("sorted") == "yes"
    if row["graph"] == "data":
        graph = make_one_type(random, times, row["weight"] == "yes", ordered)
    else:
        graph = make_types(random, times, row["weight"] == "yes", row["reverses"] == "yes", ordered)
    sort_by_end(graph, {"csr": 0, "csc": 1, "both": 1}.get(row.get("layout", "coo")))
    return graph, (to_data if row["graph"] == "data" else to_hetero)(random, graph, dtype)


def draw_fanouts(row: Row, random: Random, graph: Parts) -> tuple[Any, dict[Any, list[int]]]:
    """(`num_neighbors`, fanouts of each relation)."""
    values = {"few": [1, 2], "many": [3, 6, 40], "all": [-1], "mixed": [-1, 0, 1, 2, 5], "none": [0]}[row["fanout"]]
    hops = 0 if row["fanout"] == "none" and random.random() < 0.5 else int(row["hops"])
    fanouts = [random.choice(values) for _ in range(hops)]
    if row["fanout_by"] == "hop":
        return fanouts, dict.fromkeys(graph.edges, fanouts)
    by_relation = {kind: [random.choice(values) for _ in range(hops)] for kind in graph.edges}
    return by_relation, by_relation


def sampling_arguments(row: Row) -> dict[str, Any]:
    """Arguments of a loader or sampler of neighbors."""
    return {
        "replace": row["replace"] == "yes", "disjoint": row["disjoint"] == "yes", "subgraph_type": row["subgraph"],
        "temporal_strategy": row["strategy"], "time_comparison": row["compare"],
        "time_window": int(row["window"]) if row["window"] == WINDOW else None,
        "time_attr": {"none": None, "node": "time", "edge": "when"}[row["time"]],
        "weight_attr": "weight" if row["weight"] == "yes" else None, "is_sorted": row.get("sorted") == "yes",
        "sampling": "uniform" if row.get("sampling", "uniform") == "uniform" else "labor",
        "layer_dependency": row.get("sampling") == "layers",
    }  # fmt: skip


def draw_times(row: Row, random: Random, count: int) -> list[Any]:
    """A time for each seed, or its window."""
    times = [random.randrange(-1, 9) for _ in range(count)]
    return [(time - random.randrange(-1, 7), time) for time in times] if row["window"] == OWN_WINDOWS else times


def name_times(row: Row, name: str, times: list[Any] | None) -> dict[str, Any]:
    """Arguments of a loader that give it times of seeds, or windows."""
    if times is None or row["window"] != OWN_WINDOWS:
        return {name: None if times is None else torch.tensor(times, dtype=torch.int64)}
    start, end = torch.tensor(times, dtype=torch.int64).reshape(-1, 2).unbind(1)
    return {"input_start_time": start, "input_end_time": end}


def expect_times(row: Row, name: str, times: list[Any] | None) -> dict[str, Any]:
    """What a batch tells of times of seeds, or windows."""
    if times is None or row["window"] != OWN_WINDOWS:
        return {name: times}
    start = name.replace("time", "start_time")
    return {start: [own for own, _ in times], name: [own for _, own in times]}


def expect_sample(row: Row, graph: Parts, seeds: dict, fanouts: dict, key: int, times: dict | None) -> Output:
    """What is sampled, by the reference."""
    sampling = row.get("sampling", "uniform")
    options = Options(row["replace"] == "yes", row["disjoint"] == "yes",
                      "induced" if row["subgraph"] == "induced" else "directional", row["strategy"], row["compare"],
                      int(row["window"]) if row["window"] == WINDOW else None,
                      row["window"] == OWN_WINDOWS, "uniform" if sampling == "uniform" else "labor",
                      sampling == "layers")  # fmt: skip
    out = sample(graph, seeds, fanouts, key, options, times)
    return make_bidirectional(out, row["graph"] == "data") if row["subgraph"] == "bidirectional" else out


def rows_of(store: Any, ids: list[int] | None, skip: tuple[str, ...]) -> dict[str, Any]:
    """The rows of ids, by attribute; without ids there are none, as where edges were merged."""
    return {key: value[torch.tensor(ids, dtype=torch.int64)] for key, value in store.items()
            if key not in skip and ids is not None}  # fmt: skip


def check_parts(batch: Any, data: Any, out: Output, more: dict[Any, dict[str, Any]]) -> None:
    """Every store of a batch holds what is expected; `more` is what loaders add, by type."""
    trees, nodes, edges = out.batch or {}, out.num_sampled_nodes or {}, out.num_sampled_edges or {}
    is_typed = NODES not in out.node
    whole: dict[str, Any] = {}
    for kind, ids in out.node.items():
        store = data[kind] if is_typed else data
        edge_names = () if is_typed else ("edge_attr", "when", "weight")
        expected = {**rows_of(store, ids, ("edge_index", "num_nodes", *edge_names)), "n_id": ids,
                    "num_nodes": len(ids), "batch": trees.get(kind), "num_sampled_nodes": nodes.get(kind),
                    **more.get(kind, {})}  # fmt: skip
        if is_typed:
            assert_store(kind, batch[kind], expected)
        whole |= expected
    for kind, ids in out.edge.items():
        store = data[kind] if is_typed else data
        names = ("edge_index", "num_nodes", *(() if is_typed else ("x", "y", "time")))
        expected = {**rows_of(store, ids, names), "e_id": ids, "edge_index": [out.row[kind], out.col[kind]],
                    "num_sampled_edges": edges.get(kind), **more.get(kind, {})}  # fmt: skip
        if is_typed:
            assert_store(str(kind), batch[kind], expected)
        whole |= expected
    if not is_typed:
        assert_store("batch", batch, whole)


def draw_seeds(row: Row, random: Random, count: int) -> tuple[Any, list[int]]:
    """(`input_nodes`, their ids)."""
    kind = row["seeds"]
    if kind == "all":
        return None, list(range(count))
    if kind == "mask":
        mask = [random.random() < 0.7 for _ in range(count)]
        return torch.tensor(mask), [node for node, holds in enumerate(mask) if holds]
    ids = [random.randrange(count) for _ in range(24 if kind == "repeated" else 0)]
    if kind == "ids":
        ids = random.sample(range(count), random.randint(1, count))
    return torch.tensor(ids, dtype=random.choice([torch.int64, torch.int32])), ids


def run(row: Row, random: Random, device: str, hold: Callable[[Any], Any] = same, wrap: Callable[[Any], Any] = same
        ) -> int:  # fmt: skip
    """Check the batches of a loader.

    Args:
        row, random, device: The case.
        hold: Gives the graph to loaders as something else than PyG's data.
        wrap: What is made of each loader.
    """
    graph, data = draw_graph(row, random)
    num_neighbors, fanouts = draw_fanouts(row, random, graph)
    graph.direction = "in" if row["direction"] == "forward" else "out"
    options, arguments = read_loading(row, random, device), sampling_arguments(row)
    kind = NODES
    if row["graph"] == "hetero":
        kind = random.choice(list(graph.num_nodes) if row["time"] != "node" or row["input_time"] == "given"
                             else list(graph.node_time) or ["a"])  # fmt: skip
        if row["time"] == "node" and kind not in graph.node_time and row["input_time"] == "own":
            # One time keeps any order of edges that are sorted.
            few = 1 if row["sorted"] == "yes" else 8
            graph.node_time[kind] = [random.randrange(few) for _ in range(graph.num_nodes[kind])]
            data[kind].time = torch.tensor(graph.node_time[kind])
    given, ids = draw_seeds(row, random, graph.num_nodes[kind])
    times = None
    if row["input_time"] == "given":
        if row["time"] == "node" and not graph.node_time:
            graph.node_time["a"] = [0] * graph.num_nodes["a"]
            data["a"].time = torch.tensor(graph.node_time["a"])
        if row["time"] == "edge" and not graph.edge_time:
            first = next(iter(graph.edges))
            graph.edge_time[first] = [0] * len(graph.edges[first])
            data[first].when = torch.tensor(graph.edge_time[first], dtype=torch.int64)
        times = draw_times(row, random, len(ids))
    if row["weight"] == "yes" and not graph.edge_weight:
        first = next(iter(graph.edges))
        graph.edge_weight[first] = [1.0] * len(graph.edges[first])
        data[first].weight = torch.tensor(graph.edge_weight[first])
    input_nodes = given if kind == NODES else (kind, given)
    given_times = name_times(row, "input_time", times)
    options["ranks"], options["uneven"] = RANKS[row["ranks"]]
    # A batch tells the positions of its seeds, of a mask their ids, or what the user calls them.
    names = ids if row["seeds"] == "mask" else list(range(len(ids)))
    if row["input_id"] == "given" and given is not None:
        names = [100 + 3 * position for position in range(len(ids))]
        options["input_id"] = torch.tensor(names, dtype=torch.int64)

    places, held = read_topology(row), hold(data)

    def make() -> Any:
        return wrap(make_loader())

    def make_loader() -> Any:
        if row["via"] == "NodeLoader":
            sampler = NeighborSampler(held, num_neighbors, sample_direction=row["direction"], device=device,
                                      placement=row["placement"] if row["topology"] == "same" else row["topology"],
                                      seed=options["seed"], **arguments)  # fmt: skip
            return NodeLoader(held, sampler, input_nodes, **given_times, **options)
        if row["via"] == "SubGraphLoader":
            rest = {name: value for name, value in arguments.items() if name != "subgraph_type"}
            return SubGraphLoader(held, input_nodes, num_neighbors, **given_times, **rest, **places, **options)
        return NeighborLoader(held, num_neighbors, input_nodes, **given_times, hotness=row["hotness"],
                              presample=None if row["presample"] == "none" else float(row["presample"]),
                              super_batch=int(row["super_batch"]), **arguments, **places, **options)  # fmt: skip

    def check(batch: Any, positions: list[int], key: int) -> None:
        seeds = {kind: [ids[position] for position in positions]}
        own = None if times is None else {kind: [times[position] for position in positions]}
        out = expect_sample(row, graph, seeds, fanouts, key, own)
        more = {
            "input_id": [names[position] for position in positions],
            "batch_size": len(positions),
            **expect_times(row, "seed_time", None if own is None else own[kind]),
        }
        if row["via"] == "SubGraphLoader":
            more["mapping"] = list(range(len(positions)))
        check_parts(batch, data, out, {kind: more})

    checked = run_epochs(make, row, random, len(ids), options, check)
    if row["leave"] == "call" and row["ranks"] == "none" and ids:
        loader = make()
        positions = [random.randrange(len(ids)) for _ in range(random.randint(1, 4))]
        check(loader(positions), positions, call_key(options["seed"], 0))
        checked += 1
    return checked
