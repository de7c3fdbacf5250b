"""Classes of PyG that create ours. Ids of a batch are on the host when a program reads them, and stay on the device
until then. Data that ours refuse are left to PyG.
"""

import copy
import pickle

import pytest
import torch
import torch_geometric
from torch_geometric.data import Batch, Data, HeteroData

from pyg_direct.noedit.replaced_class import show_ids

# What is read moves there, which a machine without a GPU can tell.
ELSEWHERE = torch.device("meta")


def make_batch():
    return Data(x=torch.randn(3, 2), n_id=torch.tensor([4, 7, 9]), e_id=torch.tensor([1]), input_id=torch.tensor([0]))


def test_ids_are_found_where_they_are_wanted():
    batch = show_ids(make_batch(), ELSEWHERE)

    assert [batch.n_id.device, batch["e_id"].device, batch.input_id.device] == [ELSEWHERE] * 3
    assert batch.x.device.type == "cpu"


def test_ids_that_are_asked_for_are_found_there_too():
    batch = show_ids(make_batch(), ELSEWHERE)
    data = HeteroData()
    data["paper"].n_id = torch.tensor([4])
    paper = show_ids(data, ELSEWHERE)["paper"]

    assert [batch.get("n_id").device, paper.get("n_id").device] == [ELSEWHERE] * 2
    assert (batch.get("y"), batch.get("y", 3), paper.get("x", 3)) == (None, 3, 3)


def test_seed_links_are_found_beside_the_ids_that_they_index():
    batch = make_batch()
    batch.edge_label_index, batch.edge_label = torch.tensor([[0, 1], [2, 0]]), torch.ones(2)
    batch = show_ids(batch, ELSEWHERE)

    found = batch.n_id[batch.edge_label_index[:, 1:]]

    assert found.shape == (2, 1)
    assert batch.edge_label.device == ELSEWHERE


def test_ids_that_are_not_read_stay():
    batch = show_ids(make_batch(), ELSEWHERE)

    assert batch.to_dict()["n_id"].tolist() == [4, 7, 9]


def test_a_batch_that_the_program_moves_has_its_ids_where_it_was_moved():
    batch = show_ids(make_batch(), ELSEWHERE).to("cpu")

    assert batch.n_id.tolist() == [4, 7, 9]
    assert batch.num_nodes == 3


def test_moving_edges_alone_leaves_ids_to_be_shown():
    batch = show_ids(make_batch(), ELSEWHERE).to("cpu", "x")

    assert batch.n_id.device == ELSEWHERE


def keep_first(value):
    if not isinstance(value, torch.Tensor):
        return value * 2
    return None if value.dtype == torch.float32 else value[:1]


@pytest.mark.parametrize("names", [(), ("y", "n_id", "num_sampled_nodes", "missing")])
def test_what_is_applied_to_a_batch_gives_what_pyg_gives(names):
    expected = make_batch()
    expected.y, expected.num_sampled_nodes, expected.num_nodes = torch.arange(3), [1, 2], 3
    batch = show_ids(copy.copy(expected), ELSEWHERE)
    # Kinds of attributes are remembered, until they change.
    assert expected.is_node_attr("y")
    assert batch.is_node_attr("y")

    expected.apply(keep_first, *names)
    changed = batch.apply(keep_first, *names)

    assert changed is batch
    assert list(batch.to_dict()) == list(expected.to_dict())
    assert batch.num_sampled_nodes == expected.num_sampled_nodes == [2, 4]
    assert batch.is_node_attr("y") == expected.is_node_attr("y") is False
    assert batch.to_dict()["n_id"].tolist() == [4]
    assert batch.e_id.device == ELSEWHERE


def test_ids_on_the_host_are_sent_to_the_others_and_found_on_the_host():
    batch = make_batch()
    batch.n_id, batch.e_id, given = batch.n_id.to(ELSEWHERE), batch.e_id.to(ELSEWHERE), batch.input_id
    batch = show_ids(batch)
    other = copy.copy(batch)

    assert batch.to_dict()["input_id"].device == ELSEWHERE
    assert batch.input_id is given
    assert other.to(ELSEWHERE).input_id.device == ELSEWHERE


def test_a_clone_is_shown_as_its_batch_is():
    batch = show_ids(make_batch(), ELSEWHERE)
    other = batch.clone()

    assert other.to_dict()["n_id"].tolist() == [4, 7, 9]
    assert [other.n_id.device, batch.n_id.device] == [ELSEWHERE] * 2


def test_a_deep_copy_shows_ids_of_its_own():
    batch = make_batch()
    batch.n_id = batch.n_id.to(ELSEWHERE)
    other = copy.deepcopy(show_ids(batch))

    other.input_id.fill_(8)

    assert (batch.input_id.tolist(), other.input_id.tolist()) == ([0], [8])


def test_what_is_computed_of_an_id_is_shown_in_its_place():
    batch = make_batch()
    batch.n_id = batch.n_id.to(ELSEWHERE)
    batch = show_ids(batch).apply(lambda ids: ids + 1, "input_id")

    # Not the one from before.
    assert batch.to_dict()["input_id"].device == ELSEWHERE
    with pytest.raises(NotImplementedError, match="no data"):
        batch.input_id.tolist()


def test_a_copy_of_a_batch_that_moved_is_still_shown():
    batch = show_ids(make_batch(), ELSEWHERE)
    other = copy.copy(batch)

    batch.to("cpu")

    assert (batch.n_id.device.type, other.n_id.device) == ("cpu", ELSEWHERE)


def test_a_new_value_is_the_programs():
    batch = show_ids(make_batch(), ELSEWHERE)

    batch.n_id = torch.tensor([1, 2, 3])

    assert batch.n_id.tolist() == [1, 2, 3]


def test_reading_a_copy_leaves_the_first():
    batch = show_ids(make_batch(), ELSEWHERE)
    other = copy.copy(batch)

    assert other.n_id.device == ELSEWHERE
    assert batch.to_dict()["n_id"].tolist() == [4, 7, 9]
    assert batch.n_id.device == ELSEWHERE


def test_every_type_has_its_ids_shown():
    batch = HeteroData()
    batch["user"].n_id = torch.tensor([3])
    batch["user", "likes", "item"].e_id = torch.tensor([5])

    show_ids(batch, ELSEWHERE)

    assert batch["user"].n_id.device == batch["user", "item"].e_id.device == ELSEWHERE
    assert batch.n_id_dict["user"].device == ELSEWHERE


def test_a_batch_can_be_sent_to_another_process():
    batch = pickle.loads(pickle.dumps(show_ids(make_batch(), ELSEWHERE)))

    assert batch.x.shape == (3, 2)
    assert batch.n_id.device == ELSEWHERE


def test_the_old_samplers_ids_are_shown_too():
    batch_size, n_id, adjs = show_ids((2, torch.tensor([4, 7]), "adjs"), ELSEWHERE)

    assert (batch_size, n_id.device, adjs) == (2, ELSEWHERE, "adjs")


@pytest.mark.gpu
def test_ids_of_a_batch_on_the_gpu_index_tensors_on_the_host():
    batch = show_ids(make_batch().to("cuda"))

    assert torch.arange(10)[batch.n_id].tolist() == [4, 7, 9]
    assert batch.x.is_cuda
    assert batch.to("cuda").input_id.is_cuda


@pytest.mark.gpu
def test_an_id_on_the_host_beside_others_on_the_gpu_is_found_on_both():
    batch = make_batch().to("cuda")
    batch.input_id = torch.tensor([5, 3])
    batch = show_ids(batch)
    moved = copy.copy(batch).to("cuda")

    assert batch.input_id.device.type == "cpu"
    assert moved.input_id.is_cuda
    assert batch.input_id.tolist() == moved.input_id.tolist() == [5, 3]


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("is_typed", [False, True])
def test_a_batch_that_is_saved_is_pygs_alone(is_typed):
    batch = make_batch()
    if is_typed:
        batch = HeteroData(a={"x": torch.ones(3, 2), "n_id": torch.tensor([4, 7, 9])}, a__to__a={"e_id": torch.ones(1)})
    batch = show_ids(batch, ELSEWHERE)

    sent = pickle.dumps(batch)
    got = pickle.loads(sent)

    assert b"pyg_direct" not in sent
    assert [type(store).__name__ for store in got.stores] == (
        ["BaseStorage", "NodeStorage", "EdgeStorage"] if is_typed else ["GlobalStorage"]
    )
    assert (got["a"] if is_typed else got).n_id.device == ELSEWHERE
    assert got.stores[0]._parent() is got


def make_pair(**more):
    """Return two graphs of one edge, the second with other attributes."""
    edge_index = torch.tensor([[0], [1]])
    first = Data(x=torch.ones(2, 2), edge_index=edge_index, y=torch.tensor([1]))
    return [first, Data(**{"x": torch.ones(2, 2), "edge_index": edge_index, "y": torch.tensor([1]), **more})]


@pytest.mark.parametrize(("more", "reason"), [
    ({"y": torch.tensor([0.5])}, "dataset must hold graphs with y of one dtype, torch.int64 as graph 0"),
    ({"x": torch.ones(2, 2, dtype=torch.float64)}, "dataset must hold graphs with x of one dtype"),
    ({"z": torch.ones(2)}, "dataset must hold graphs with equal attributes"),
])  # fmt: skip
@pytest.mark.usefixtures("_installed")
def test_graphs_that_only_pyg_joins_are_left_to_it(said, more, reason):
    graphs = make_pair(**more)
    expected = Batch.from_data_list(graphs)

    (batch,) = torch_geometric.loader.DataLoader(graphs, batch_size=2)

    assert batch.keys() == expected.keys()
    assert all(torch.equal(batch[key], expected[key]) for key in ("x", "y", "edge_index"))
    assert said.messages[0].startswith("DataLoader left to PyG: ")
    assert "graph 1" in said.messages[0]
    assert reason[:30] in said.messages[0]


@pytest.mark.parametrize("options", [{"follow_batch": "x"}, {"exclude_keys": "y"}])
@pytest.mark.usefixtures("_installed")
def test_options_that_only_pyg_takes_are_left_to_it(said, options):
    (batch,) = torch_geometric.loader.DataLoader(make_pair(), batch_size=2, **options)

    assert batch.num_graphs == 2
    assert said.messages[0].startswith(f"DataLoader left to PyG: {next(iter(options))} must be")
