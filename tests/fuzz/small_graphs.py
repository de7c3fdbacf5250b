"""Batches of many small graphs, joined, stacked and listed, beside what PyG's own code makes of the same graphs."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

import torch
from torch.utils.data import Subset
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.loader.dense_data_loader import collate_fn as stack

from pyg_direct import DataListLoader, DataLoader, DenseDataLoader
from tests.fuzz.graphs import make_rows
from tests.fuzz.space import Row, Space
from tests.fuzz.ways import RANKS, placements, run_epochs
from tests.loader.data_loader.small_graphs import InMemory, assert_equal, assert_equal_batches

FOLLOW = {"none": None, "some": ["x", "edge_index"]}
EXCLUDE = {"none": None, "some": ["y", "weight"]}


def space(device: str) -> Space:
    """The options of this subject."""
    options = {
        "via": ("DataLoader", "DenseDataLoader", "DataListLoader"), "graph": ("data", "hetero", "pairs"),
        "form": ("list", "memory", "subset", "chosen", "transform"), "more": ("none", "words", "numbers", "nested"),
        "count": ("nobody", "one", "few", "many"), "follow": tuple(FOLLOW), "exclude": tuple(EXCLUDE),
        "order": ("given", "shuffle", "drop_last"), "leave": ("never", "early", "resume"), "epochs": ("1", "3"),
        "edit": ("no", "yes"), "ranks": tuple(RANKS), "placement": placements(device), "prefetch": ("0", "1", "3"),
        "threads": ("one", "all"),
    }  # fmt: skip
    rules = (
        (("ranks", "leave"), lambda ranks, leave: ranks == "none" or leave != "resume"),
        (("via", "graph"), lambda via, graph: via != "DenseDataLoader" or graph == "data"),
        *((("via", name), lambda via, value, only=only: via == "DataLoader" or value == only)
          for name, only in (("follow", "none"), ("exclude", "none"))),
        *((("via", name), lambda via, value, only=only: via != "DataListLoader" or value == only)
          for name, only in (("placement", "auto"), ("prefetch", "0"))),
        # PyG has no data set of no graphs, and hands out copies of graphs that it keeps joined.
        (("count", "form"), lambda count, form: count != "nobody" or form in ("list", "chosen")),
        # One batch for two or three processes is none for some of them.
        (("count", "form", "ranks"), lambda count, form, ranks: count != "one" or form in ("subset", "chosen")
         or ranks in ("none", "first")),
        (("edit", "form"), lambda edit, form: edit == "no" or form == "list"),
    )  # fmt: skip
    return Space(options, rules)


class Pair(Data):
    """Increments that depend on the attribute."""

    def __inc__(self, key: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        return self.y.size(0) if key == "other_index" else super().__inc__(key, value, *args, **kwargs)


def make_graph(row: Row, random: Random, number: int) -> Any:
    """A graph; for a dense batch all are of one shape."""
    is_dense = row["via"] == "DenseDataLoader"
    nodes, edges = (3, 4) if is_dense else (random.randint(1, 5), random.randint(0, 6))

    def draw_edges(count: int) -> torch.Tensor:
        ends = [random.randrange(nodes) for _ in range(2 * count)]
        return torch.tensor(ends, dtype=torch.int64).view(2, count)

    if row["graph"] == "hetero":
        data: Any = HeteroData()
        # PyG's data sets do not give back types with `num_nodes` alone.
        data["a"].x, data["b"].num_nodes, data["b"].id = make_rows(random, nodes, 2), nodes, torch.arange(nodes)
        data["a", "to", "b"].edge_index = draw_edges(edges)
        data["a", "to", "b"].weight = make_rows(random, edges, 1)
        data["a"].y = torch.tensor([number])
    else:
        data = (Pair if row["graph"] == "pairs" else Data)(x=make_rows(random, nodes, 2), edge_index=draw_edges(edges))
        data.y, data.weight = torch.tensor([number]), make_rows(random, edges, 1)
        if row["graph"] == "pairs":
            data.other_index = draw_edges(edges)
    if row["more"] == "words":
        data.name, data.tags = f"g{number}", ["a", "b"] if is_dense else ["a", number]
    elif row["more"] == "numbers":
        data.level, data.size_of = random.choice([0.5, 2.0]), number
    elif row["more"] == "nested":
        data.parts = {"a": make_rows(random, 2, 2), "b": [torch.tensor([number])]}
    return data


def add_noise(data: Any) -> Any:
    """What Python does to each graph."""
    data.noise = torch.ones(2)
    return data


def make_dataset(row: Row, random: Random) -> tuple[Any, list[Any]]:
    """(the data set, its graphs as they are)."""
    count = {"nobody": 0, "one": 1, "few": random.randint(2, 5), "many": random.randint(6, 17)}[row["count"]]
    graphs = [make_graph(row, random, number) for number in range(count)]
    form = row["form"]
    if form == "list":
        return graphs, graphs
    if form == "memory":
        dataset: Any = InMemory(graphs)
    elif form == "transform":
        dataset = InMemory(graphs, add_noise)
    elif form == "subset":
        dataset = Subset(InMemory(graphs), [random.randrange(count) for _ in range(random.randint(1, 9))])
    else:
        dataset = Subset(graphs, [random.randrange(count) for _ in range(random.randint(1, 9) if count else 0)])
    return dataset, [dataset[place] for place in range(len(dataset))]


def run(row: Row, random: Random, device: str) -> int:
    """Check the batches of a loader."""
    dataset, graphs = make_dataset(row, random)
    options = {"batch_size": random.choice([1, 2, 4]), "shuffle": row["order"] != "given",
               "drop_last": row["order"] == "drop_last", "seed": random.getrandbits(64)}  # fmt: skip
    options["ranks"], options["uneven"] = RANKS[row["ranks"]]
    if row["via"] != "DataListLoader":
        options |= {"device": device, "placement": row["placement"], "prefetch": int(row["prefetch"])}
    keys = {"follow_batch": FOLLOW[row["follow"]], "exclude_keys": EXCLUDE[row["exclude"]]}

    def make() -> Any:
        kind = {"DataLoader": DataLoader, "DenseDataLoader": DenseDataLoader, "DataListLoader": DataListLoader}
        return kind[row["via"]](dataset, **(keys if row["via"] == "DataLoader" else {}), **options)

    def check(batch: Any, positions: list[int], key: int) -> None:
        chosen = [copy.copy(graphs[position]) for position in positions]
        if row["via"] == "DataListLoader":
            assert_equal(batch, chosen)
            assert row["form"] != "list" or all(map(lambda own, at: own is graphs[at], batch, positions))
        elif row["via"] == "DenseDataLoader":
            expected = stack(chosen)
            # What moves has lists for tuples.
            assert_equal(batch, expected if device == "cpu" else expected.to(device))
        else:
            assert_equal_batches(batch, Batch.from_data_list(chosen, **keys).to(device))

    checked = run_epochs(make, row, random, len(dataset), options, check)
    if row["edit"] == "yes" and graphs:
        # The next epoch has what was written since.
        loader = make()
        list(loader)
        graph = random.choice(graphs)
        store = graph["a"] if row["graph"] == "hetero" else graph
        store.x = store.x * 2 + 1
        if random.random() < 0.5:
            store.y.add_(100)
        loader.load_state_dict({**loader.state_dict(), "epoch": 0, "batch": 0})
        again = iter(loader)
        checked += run_epochs(lambda: _Begun(loader, again), {**row, "leave": "never", "epochs": "1"}, random,
                              len(dataset), options, check)  # fmt: skip
    return checked


class _Begun:
    """A loader whose epoch was begun."""

    def __init__(self, loader: Any, batches: Any) -> None:
        self._loader, self._batches = loader, batches

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Any:
        return self._batches
