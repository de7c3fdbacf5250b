"""Parts of a batch with types that are made at their first use are those of a batch made whole."""

import copy
import pickle

import torch

from pyg_direct import NeighborLoader
from tests.hetero_data import make_hetero


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
    assert type(copies[2]._node_store_dict) is dict


def test_nodes_are_those_of_the_graph_when_the_batch_was_made():
    data = make_hetero()
    expected = {kind: rows.clone() for kind, rows in load(data).x_dict.items()}
    batch = load(data)

    for store in data.node_stores:
        store.note = "later"
    for rows in data.x_dict.values():
        rows.zero_()

    assert {kind: rows.tolist() for kind, rows in batch.x_dict.items()} == {
        kind: rows.tolist() for kind, rows in expected.items()
    }
    assert all("note" not in store and store._parent() is batch for store in batch.node_stores)
    assert all(len(store.n_id) == store.num_nodes == sum(store.num_sampled_nodes) for store in batch.node_stores)
