"""Parts of a batch with types that are made at their first use are those of a batch made whole."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pyg_direct import NeighborLoader
from pyg_direct.sampling.hetero_sample import LazyDict
from tests.hetero_data import make_hetero

ITEMS = {"a": 1, "b": 2}
USES = {
    "get": lambda d: d.get("b"),
    "item": lambda d: d["a"],
    "in": lambda d: "a" in d,
    "length": len,
    "list": list,
    "reversed": lambda d: list(reversed(d)),
    "values": lambda d: list(d.values()),
    "copy": lambda d: d.copy(),
    "shallow": copy.copy,
    "deep": copy.deepcopy,
    "pickle": lambda d: pickle.loads(pickle.dumps(d)),
    "unpacked": lambda d: {**d},
    "dict": dict,
    "joined": lambda d: {"c": 3} | d,
    "joined to": lambda d: d | {"c": 3},
    "equal": lambda d: d == ITEMS,
    "repr": repr,
    "pop": lambda d: (d.pop("a"), dict(d)),
    "set": lambda d: (d.__setitem__("c", 3), dict(d)),
    "delete": lambda d: (d.__delitem__("a"), dict(d)),
    "default": lambda d: (d.setdefault("c", 3), dict(d)),
    "update": lambda d: (d.update(c=3), dict(d)),
    "clear": lambda d: (d.clear(), dict(d)),
}


@pytest.mark.parametrize("use", USES)
def test_items_are_there_at_any_use(use):
    made = []
    lazy = LazyDict(lambda: made.append(1) or dict(ITEMS))

    assert made == []
    assert USES[use](lazy) == USES[use](dict(ITEMS))
    assert made == [1]
    len(lazy)
    assert made == [1]


def test_a_change_comes_with_the_items():
    lazy = LazyDict(lambda: dict(ITEMS))

    lazy.when_made(lambda items: items.update(a=5))

    assert lazy == {"a": 5, "b": 2}


def test_threads_make_the_items_once():
    made = []
    lazy = LazyDict(lambda: made.append(1) or {number: object() for number in range(1000)})

    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda number: lazy[number % 10], range(40)))

    assert made == [1]
    assert all(one is got[number % 10] for number, one in enumerate(got))


def load(data, **options):
    return next(iter(NeighborLoader(data, [3, 2], "paper", batch_size=8, seed=1, device="cpu", **options)))


def test_relations_are_those_of_the_graph_when_the_batch_was_made():
    data = make_hetero()
    expected = {store._key: store.edge_index.clone() for store in load(data).edge_stores}
    batch = load(data)

    for store in data.edge_stores:
        store.note = "later"

    assert {kind: edges.tolist() for kind, edges in batch.edge_index_dict.items()} == {
        kind: edges.tolist() for kind, edges in expected.items()
    }
    assert all("note" not in store for store in batch.edge_stores)
    assert all(store._parent() is batch for store in batch.edge_stores)
    assert all(len(store.e_id) == store.edge_index.shape[1] == sum(store.num_sampled_edges)
               for store in batch.edge_stores)  # fmt: skip


def test_relations_keep_what_the_graph_says_of_them():
    data = make_hetero()
    for store in data.edge_stores:
        store.note = "of the graph"

    assert all(store.note == "of the graph" for store in load(data).edge_stores)


def test_counts_of_a_batch_are_its_own():
    batch = load(make_hetero())
    kinds = list(batch.edge_types)

    batch[kinds[0]].num_sampled_edges.append(7)

    assert load(make_hetero())[kinds[0]].num_sampled_edges != batch[kinds[0]].num_sampled_edges


def test_edges_made_in_inference_mode_can_be_trained_on():
    batch = load(make_hetero())
    with torch.inference_mode():
        edges = list(batch.edge_index_dict.values())

    assert not any(pair.is_inference() for pair in edges)


def test_a_copy_and_a_pickle_have_all_relations():
    batch = load(make_hetero())
    copies = [copy.copy(load(make_hetero())), copy.deepcopy(load(make_hetero())),
              pickle.loads(pickle.dumps(load(make_hetero())))]  # fmt: skip

    for other in copies:
        assert other.edge_types == batch.edge_types
        assert all(torch.equal(other[kind].edge_index, batch[kind].edge_index) for kind in batch.edge_types)
    assert type(copies[2]._edge_store_dict) is dict
