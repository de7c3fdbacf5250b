import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.loader import HGTLoader as PygHGTLoader

from pyg_direct import HGTLoader
from pyg_direct.errors import ArgumentError
from pyg_direct.sampler import HGTSampler
from tests.hetero_data import check_rows, make_hetero

NUM_SAMPLES = {"paper": [4, 3], "author": [3, 5], "venue": [1, 1]}


def test_batches_hold_rows_of_their_nodes_and_edges(device):
    data = make_hetero()

    batches = list(HGTLoader(data, NUM_SAMPLES, ("paper", torch.arange(20)), batch_size=8, device=device, seed=0))

    assert [batch["paper"].batch_size for batch in batches] == [8, 8, 4]
    for number, batch in enumerate(batches):
        check_rows(data, batch)
        assert batch["paper"].input_id.tolist() == list(range(8 * number, min(8 * number + 8, 20)))
        assert batch["paper"].n_id[: batch["paper"].batch_size].tolist() == batch["paper"].input_id.tolist()
        assert batch["paper"].num_nodes <= batch["paper"].batch_size + 7
        assert batch["paper"].x.device.type == device.type


def test_equal_seeds_give_equal_epochs():
    options = {"batch_size": 8, "shuffle": True, "seed": 3, "device": "cpu"}
    first, second = (HGTLoader(make_hetero(), [3, 2], "paper", **options) for _ in range(2))

    assert [b["paper"].n_id.tolist() for b in first] == [b["paper"].n_id.tolist() for b in second]
    assert [b["author"].n_id.tolist() for b in first] == [b["author"].n_id.tolist() for b in second]


@pytest.mark.sparse
def test_takes_as_many_nodes_as_pygs_where_all_are_taken():
    data = make_hetero()
    seeds = ("paper", torch.arange(10))

    ours = next(iter(HGTLoader(data, [1000, 1000], seeds, batch_size=10, device="cpu")))
    peer = next(iter(PygHGTLoader(data, [1000, 1000], seeds, batch_size=10)))

    for kind in data.node_types:
        assert set(ours[kind].n_id.tolist()) == set(peer[kind].n_id.tolist()), kind
    for kind in data.edge_types:
        assert sorted(ours[kind].e_id.tolist()) == sorted(peer[kind].e_id.tolist()), kind


def test_refuses_what_pyg_refuses():
    with pytest.raises(NotImplementedError, match="got Data: NeighborLoader takes graphs without"):
        HGTLoader(Data(edge_index=torch.empty(2, 0).long(), num_nodes=3), [1], "paper", device="cpu")
    with pytest.raises(ArgumentError, match="num_samples"):
        HGTLoader(make_hetero(), {"nope": [1]}, "paper", device="cpu")


@pytest.mark.parametrize(
    ("num_samples", "message"),
    [
        ({"paper": [4], "author": [4]}, "for every node type, got none for 'venue': 0 for each layer samples none"),
        ({}, "for every node type, got none for"),
        ({**NUM_SAMPLES, "venues": [1, 1]}, "num_samples must name known node types, got .'venues'. of"),
        ({**NUM_SAMPLES, "venue": [1]}, "number of layers must be the same across all node types, got .*1 for 'venue'"),
        ([-1], "num_samples must hold numbers of at least 0"),
    ],
)
@pytest.mark.parametrize("make", [HGTLoader, HGTSampler])
def test_a_type_that_no_number_is_given_for_is_named(make, num_samples, message):
    options = {"input_nodes": "paper"} if make is HGTLoader else {}

    with pytest.raises(ArgumentError, match=message):
        make(make_hetero(), num_samples, device="cpu", **options)


def test_a_type_that_an_edit_adds_is_sampled_as_the_others_or_named(device):
    data, twin = make_hetero(), make_hetero()
    loader = HGTLoader(data, [50], "paper", batch_size=40, device=device)
    named = HGTLoader(twin, dict.fromkeys(twin.node_types, (50,)), "paper", batch_size=40, device=device)
    for graph in (data, twin):
        graph["tag"].x = torch.randn(3, 2)
        graph["tag", "on", "paper"].edge_index = torch.tensor([[0, 1, 2], [4, 5, 6]])

    (batch,) = loader

    assert sorted(batch["tag"].n_id.tolist()) == [0, 1, 2]
    with pytest.raises(ArgumentError, match="got none for 'tag'"):
        next(iter(named))
