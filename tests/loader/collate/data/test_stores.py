"""Graphs behind PyG's stores: equal batches, rows of edges by edge id, `Feature` as a store."""

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import NeighborLoader as PygNeighborLoader
from torch_geometric.testing import MyFeatureStore, MyGraphStore
from torch_geometric.utils import sort_edge_index

from pyg_direct import CSRTopo, Feature, FeatureStore, LinkNeighborLoader, NeighborLoader, save_rows
from pyg_direct.errors import ArgumentError, ArgumentTypeError
from tests.batches import make_data
from tests.hetero_data import check_rows, make_hetero, name_edges

WRITES = ("author", "writes", "paper")


def store_graph(data, features=None):
    """The stores of a `HeteroData`."""
    features, graph = MyFeatureStore() if features is None else features, MyGraphStore()
    for kind, part in data.node_items():
        if "x" in part:
            features.put_tensor(part.x, group_name=kind, attr_name="x", index=None)
    for kind, part in data.edge_items():
        features.put_tensor(part.edge_attr, group_name=kind, attr_name="edge_attr", index=None)
        size = data[kind[0]].num_nodes, data[kind[2]].num_nodes
        graph.put_edge_index(tuple(part.edge_index), edge_type=kind, layout="coo", size=size)
    return features, graph


def put_in_layout(graph, kind, edge_index, size, layout):
    """Put edges that are sorted as the layout has them."""
    rows = edge_index[0 if layout == "csr" else 1]
    pointer = torch.cat([torch.zeros(1).long(), torch.bincount(rows, minlength=size[layout == "csc"]).cumsum(0)])
    pair = (pointer, edge_index[1]) if layout == "csr" else (edge_index[0], pointer)
    graph.put_edge_index(pair, edge_type=kind, layout=layout, size=size)


@pytest.mark.parametrize("own_store", [False, True])
def test_batches_are_those_of_the_graph_itself(real_device, own_store):
    data = make_hetero()
    del data["nobody"]
    stores = store_graph(data, FeatureStore(real_device) if own_store else None)
    options = {"input_nodes": "paper", "batch_size": 16, "seed": 1, "device": real_device}

    batches = list(NeighborLoader(stores, [3, 2], **options))

    for batch, other in zip(batches, NeighborLoader(data, [3, 2], **options), strict=True):
        check_rows(data, batch)
        assert name_edges(batch) == name_edges(other)
        assert batch["paper"].x.device.type == real_device.type


@pytest.mark.parametrize("layout", ["csr", "csc"])
def test_edge_ids_are_positions_in_the_layout_kept(real_device, layout):
    data, (features, graph) = make_hetero(), (MyFeatureStore(), MyGraphStore())
    edge_index = sort_edge_index(data[WRITES].edge_index, sort_by_row=layout == "csr")
    put_in_layout(graph, WRITES, edge_index, (25, 40), layout)
    features.put_tensor(torch.arange(150) * 10, group_name=WRITES, attr_name="number", index=None)

    (batch,) = NeighborLoader((features, graph), [-1], ("paper", [3, 9]), batch_size=2, device=real_device)

    part = batch[WRITES]
    ends = torch.stack([batch["author"].n_id[part.edge_index[0]], batch["paper"].n_id[part.edge_index[1]]]).cpu()
    assert torch.equal(ends, edge_index[:, part.e_id.cpu()])
    assert torch.equal(part.number, part.e_id * 10)
    assert sorted(ends[1].unique().tolist()) == [n for n in (3, 9) if bool((edge_index[1] == n).any())]


@pytest.mark.parametrize("name", ["edge_attr", "strength"])
def test_a_graph_without_types_has_rows_of_edges_too(real_device, name):
    data, (features, graph) = make_data(), (MyFeatureStore(), MyGraphStore())
    features.put_tensor(data.x, group_name=None, attr_name="x", index=None)
    features.put_tensor(data.edge_attr, group_name=None, attr_name=name, index=None)
    graph.put_edge_index(tuple(data.edge_index), edge_type=None, layout="coo", size=(70, 70))

    for batch in NeighborLoader((features, graph), [3, 2], torch.arange(70), batch_size=16, device=real_device):
        assert torch.equal(batch[name].cpu(), data.edge_attr[batch.e_id.cpu()])
        assert torch.equal(batch.x.cpu(), data.x[batch.n_id.cpu()])
        ends = batch.n_id[batch.edge_index].cpu()
        assert torch.equal(ends, data.edge_index[:, batch.e_id.cpu()])


@pytest.mark.parametrize("layout", ["csr", "csc"])
def test_a_graph_without_types_is_kept_in_every_layout(real_device, layout):
    data, (features, graph) = make_data(), (MyFeatureStore(), MyGraphStore())
    data.edge_index = sort_edge_index(data.edge_index, sort_by_row=layout == "csr")
    features.put_tensor(data.x, group_name=None, attr_name="x", index=None)
    put_in_layout(graph, None, data.edge_index, (70, 70), layout)

    for batch in NeighborLoader((features, graph), [3, 2], torch.arange(70), batch_size=16, device=real_device):
        ends = batch.n_id[batch.edge_index].cpu()
        assert torch.equal(ends, data.edge_index[:, batch.e_id.cpu()])
        assert torch.equal(batch.x.cpu(), data.x[batch.n_id.cpu()])


def test_times_come_from_the_store(real_device):
    data = make_hetero()
    features, graph = store_graph(data)
    for kind in ("paper", "author", "venue"):
        features.put_tensor(torch.arange(data[kind].num_nodes), group_name=kind, attr_name="time", index=None)

    (batch,) = NeighborLoader((features, graph), [-1, -1], ("paper", [20, 30]), time_attr="time",
                              input_time=torch.tensor([5, 11]), batch_size=2, device=real_device)  # fmt: skip

    for kind in ("author", "venue"):
        assert bool((batch[kind].time <= torch.tensor([5, 11], device=real_device)[batch[kind].batch]).all())
    assert batch["author"].num_nodes > 0


def test_links_of_a_relation_come_from_the_store(real_device):
    data = make_hetero()

    batches = list(LinkNeighborLoader(store_graph(data), [2], WRITES, neg_sampling_ratio=1.0, batch_size=50,
                                      device=real_device))  # fmt: skip

    for batch in batches:
        local = batch[WRITES].edge_label_index[:, :50]
        ends = [batch[kind].n_id[end].tolist() for kind, end in zip(("author", "paper"), local, strict=True)]
        assert ends == data[WRITES].edge_index[:, batch[WRITES].input_id].tolist()


def test_a_relation_without_links_has_no_batches(real_device):
    features, graph = store_graph(make_hetero())
    graph.put_edge_index(torch.empty(2, 0).long(), edge_type=("paper", "praises", "paper"), layout="coo", size=(40, 40))

    assert list(LinkNeighborLoader((features, graph), [2], ("paper", "praises", "paper"), shuffle=True,
                                   device=real_device)) == []  # fmt: skip
    with pytest.raises(ArgumentError, match=r"edge_label_index must name a known relation, got \('a', 'b', 'c'\) of"):
        LinkNeighborLoader((features, graph), [2], ("a", "b", "c"), device=real_device)


@pytest.mark.parametrize("count", [None, 20])
def test_links_of_a_graph_without_types_are_those_of_the_relation_none(real_device, count):
    data, (features, graph) = make_data(), (MyFeatureStore(), MyGraphStore())
    graph.put_edge_index(tuple(data.edge_index), edge_type=None, layout="coo", size=(70, 70))
    links = None if count is None else data.edge_index[:, :count]

    batches = list(LinkNeighborLoader((features, graph), [2], (None, links), neg_sampling="binary", batch_size=50,
                                      device=real_device))  # fmt: skip

    got = torch.cat([batch.n_id[batch.edge_label_index[:, batch.edge_label > 0]] for batch in batches], dim=1).cpu()
    assert torch.equal(got, data.edge_index[:, :count])
    with pytest.raises(ArgumentTypeError, match="edge_label_index must name a relation, got None"):
        LinkNeighborLoader(store_graph(make_hetero()), [2], (None, links), device=real_device)


def test_batches_may_have_a_class_of_their_own(real_device):
    class Bundle(HeteroData):
        pass

    (batch,) = NeighborLoader(store_graph(make_hetero()), [2], ("paper", [3]), custom_cls=Bundle, device=real_device)

    assert type(batch) is Bundle


class TestFeatureStore:
    """`Feature` behind PyG's interface, for our loaders and for PyG's."""

    @pytest.fixture
    def store(self, real_device):
        """A store with rows of 70 nodes."""
        store = FeatureStore(real_device)
        store.put_tensor(make_data().x, group_name=None, attr_name="x", index=None)
        return store

    def test_rows_are_read_by_id_or_slice_or_whole(self, store, real_device):
        x = make_data().x

        rows = store.get_tensor(group_name=None, attr_name="x", index=torch.tensor([5, 5, 0]))
        part = store.get_tensor(group_name=None, attr_name="x", index=slice(3, 9, 2))
        whole = store.get_tensor(group_name=None, attr_name="x", index=None)
        none = store.get_tensor(group_name=None, attr_name="x", index=slice(9, 3))

        assert torch.equal(none.cpu(), x[9:3])
        assert torch.equal(rows.cpu(), x[[5, 5, 0]])
        assert torch.equal(part.cpu(), x[3:9:2])
        assert torch.equal(whole.cpu(), x)
        assert rows.device.type == real_device.type

    @pytest.mark.parametrize("learned", [False, True], ids=["", "learned"])
    @pytest.mark.parametrize("index", [3, -1, np.int64(2), torch.tensor(4), torch.arange(70) % 7 == 0], ids=repr)
    def test_numbers_and_masks_are_indices_as_of_a_tensor(self, store, learned, index):
        x = make_data().x
        store.put_tensor(x.clone().requires_grad_(learned), group_name=None, attr_name="x", index=None)

        got = store.get_tensor(group_name=None, attr_name="x", index=index)

        assert torch.equal(got.cpu(), x[index])

    @pytest.mark.parametrize(
        "index", [[], (), np.array([]), torch.tensor([]), [True] * 70, np.arange(70) < 3, range(2)]
    )
    def test_lists_and_arrays_are_indices_and_no_ids_give_no_rows(self, store, index):
        expected = make_data().x[torch.as_tensor(index).to(torch.bool if len(index) == 70 else torch.int64)]

        for got in (store.get_tensor(None, "x", index), store.get_tensor(group_name=None, attr_name="x", index=index)):
            assert torch.equal(got.cpu(), expected)

    def test_rows_by_an_array_are_an_array_where_that_is_asked_for(self, store):
        got = store.get_tensor(None, "x", np.array([3]), convert_type=True)

        assert isinstance(got, np.ndarray)
        assert torch.equal(torch.from_numpy(got), make_data().x[3:4])

    @pytest.mark.parametrize(
        ("index", "message"), [("a", "must be ids, got 'a'"), ([0.5], "must have dtype int64 or int32, got .*long")]
    )
    def test_what_is_no_index_is_named_and_so_are_tables_that_are_not_there(self, store, index, message):
        with pytest.raises(ArgumentTypeError, match=f"^index {message}"):
            store.get_tensor(None, "x", index)
        with pytest.raises(KeyError, match=r"attr_name must be of a table in the store, got .None, 'z'. of"):
            store.get_tensor(None, "z", None)

    @pytest.mark.parametrize("index", [70, -71, torch.ones(69, dtype=torch.bool), True])
    def test_numbers_and_masks_of_other_tables_are_refused(self, store, index):
        with pytest.raises(
            ArgumentError, match=r"index must (lie in \[-70, 70\), got|be a mask of 70 rows, got shape) "
        ):
            store.get_tensor(group_name=None, attr_name="x", index=index)

    def test_arrays_files_and_features_are_tables(self, store, real_device, tmp_path):
        np.save(tmp_path / "rows.npy", np.arange(20.0, dtype=np.float32).reshape(10, 2))
        mapped = np.load(tmp_path / "rows.npy", mmap_mode="r")
        feature = Feature(device=real_device).from_cpu_tensor(torch.arange(6).view(3, 2))

        store.put_tensor(mapped, group_name="a", attr_name="x", index=None)
        store.put_tensor(feature, group_name="b", attr_name="x", index=None)

        assert store.get_tensor("a", "x", index=torch.tensor([9])).tolist() == [[18.0, 19.0]]
        assert store.get_tensor("b", "x", index=torch.tensor([1])).tolist() == [[2, 3]]
        assert store.get_tensor_size(group_name="a", attr_name="x", index=None) == (10, 2)
        assert len(store.get_all_tensor_attrs()) == 3

    def test_a_loader_reads_rows_from_a_file(self, real_device, tmp_path):
        data = make_data()
        store, graph = FeatureStore(real_device), MyGraphStore()
        on_disk = Feature(device=real_device, host_cache_size="10%").from_file(save_rows(tmp_path / "x.npy", data.x))
        store.put_tensor(on_disk, group_name=None, attr_name="x", index=None)
        graph.put_edge_index(data.edge_index, edge_type=None, layout="coo", size=(data.num_nodes, data.num_nodes))

        batches = list(NeighborLoader((store, graph), [3, 2], torch.arange(60), batch_size=16, device=real_device))

        for batch in batches:
            assert batch.x.device == batch.n_id.device
            assert torch.equal(batch.x.cpu(), data.x[batch.n_id.cpu()])
        assert len(batches) == 4
        assert on_disk.stored.num_missed > 0

    def test_tables_are_taken_away(self, store):
        assert store.remove_tensor(group_name=None, attr_name="x", index=None)
        assert store.get_all_tensor_attrs() == []

    @pytest.mark.parametrize(("rows", "index"), [(torch.ones(1, 3), torch.tensor([1])), ([1, 2], None)])
    def test_a_table_is_put_in_the_place_of_another_or_that_one_stays(self, store, rows, index):
        name = {"group_name": None, "attr_name": "x"}
        assert store.update_tensor(torch.ones(70, 3), **name, index=None)

        with pytest.raises((ArgumentTypeError, NotImplementedError)):
            store.update_tensor(rows, **name, index=index)

        assert store.get_tensor(**name, index=None).tolist() == [[1.0] * 3] * 70

    @pytest.mark.sparse
    def test_a_loader_of_pyg_reads_it(self, store):
        data, graph = make_data(), MyGraphStore()
        graph.put_edge_index(tuple(data.edge_index), edge_type=None, layout="coo", size=(70, 70))

        batch = next(iter(PygNeighborLoader((store, graph), [2], torch.arange(9), batch_size=9)))

        assert torch.equal(batch.x.cpu(), data.x[batch.n_id])

    def test_narrow_rows_come_back_wide(self, real_device):
        store = FeatureStore(real_device, store_dtype=torch.float16)
        x = torch.rand(9, 8)

        store.put_tensor(x, group_name=None, attr_name="x", index=None)
        store.put_tensor(torch.arange(9), group_name=None, attr_name="y", index=None)

        assert torch.equal(store.get_tensor(None, "x", index=torch.arange(9)).cpu(), x.half().float())
        assert store.get_tensor(None, "y", index=torch.arange(9)).tolist() == list(range(9))

    def test_what_is_no_table_is_refused(self, store):
        with pytest.raises(ArgumentTypeError, match="tensor must be a tensor, an array or a Feature, got list"):
            store.put_tensor([1, 2], group_name=None, attr_name="y", index=None)
        with pytest.raises(NotImplementedError, match="a table is put whole"):
            store.put_tensor(torch.ones(2), group_name=None, attr_name="y", index=torch.arange(2))


def test_times_that_are_not_there_are_named():
    with pytest.raises(ArgumentError, match="time_attr must name an attribute of the feature store, got 'when'"):
        NeighborLoader(store_graph(make_hetero()), [2], "paper", time_attr="when", device="cpu")


def test_weights_of_stores_are_refused_as_in_pyg():
    with pytest.raises(NotImplementedError, match="weight_attr='weight'"):
        NeighborLoader(store_graph(make_hetero()), [2], "paper", weight_attr="weight", device="cpu")


@pytest.mark.parametrize("seeds", ["paper", ("paper", None)])
def test_all_nodes_of_a_type_may_be_seeds(seeds):
    loader = NeighborLoader(store_graph(make_hetero()), [2], seeds, batch_size=40, device="cpu")

    assert next(iter(loader))["paper"].batch_size == 40


def test_a_graph_in_stores_needs_seeds():
    with pytest.raises(ArgumentTypeError, match=r"input_nodes must be a node type or .* got None"):
        NeighborLoader(store_graph(make_hetero()), [2], device="cpu")
    graph = MyGraphStore()
    graph.put_edge_index(tuple(make_data().edge_index), edge_type=None, layout="coo", size=(70, 70))
    with pytest.raises(
        ArgumentTypeError, match="input_nodes must be ids or a mask for a graph without types in stores"
    ):
        NeighborLoader((MyFeatureStore(), graph), [2], device="cpu")


@pytest.mark.parametrize(
    ("seeds", "error", "message"),
    [
        ("paper_", ArgumentError, "input_nodes must name a known node type, got 'paper_' of"),
        (("paper_", torch.arange(3)), ArgumentError, "input_nodes must name a known node type, got 'paper_' of"),
        (torch.arange(3), ArgumentTypeError, r"input_nodes must be a node type or \(node type, nodes\) .* got Tensor"),
        (("paper", torch.ones(3).bool()), ArgumentError, r"input_nodes must have shape \[40\] as a mask, got \[3\]"),
    ],
)
def test_seeds_that_a_graph_in_stores_has_not_are_refused(seeds, error, message):
    with pytest.raises(error, match=message):
        NeighborLoader(store_graph(make_hetero()), [2], seeds, device="cpu")


def test_a_mask_of_a_graph_in_stores_without_types_is_one_of_all_nodes():
    features = FeatureStore()
    features[None, "x", None] = make_data().x

    with pytest.raises(ArgumentError, match=r"input_nodes must have shape \[70\] as a mask, got \[3\]"):
        NeighborLoader((features, make_data()), [2], torch.ones(3).bool(), device="cpu")


def test_links_between_types_that_a_graph_in_stores_has_not_are_refused():
    links = ("author", "writes", "poem"), torch.zeros(2, 3).long()

    with pytest.raises(ArgumentError, match="edge_label_index must name known node types, got 'poem' of"):
        LinkNeighborLoader(store_graph(make_hetero()), [2], links, device="cpu")


@pytest.mark.parametrize("size", [None, (70, None)])
def test_edges_of_a_store_without_types_need_a_size(size):
    graph = MyGraphStore()
    graph.put_edge_index(tuple(make_data().edge_index), edge_type=None, layout="coo", size=size)

    with pytest.raises(ArgumentError, match=r"edges in the graph store must have a size, .* got"):
        NeighborLoader((MyFeatureStore(), graph), [2], torch.arange(3), device="cpu")


def test_a_graph_of_edges_alone_needs_no_features(real_device):
    data, graph = Data(edge_index=torch.tensor([[1, 2], [0, 1]])), MyGraphStore()
    graph.put_edge_index(tuple(data.edge_index), edge_type=None, layout="coo", size=(3, 3))

    (batch,) = NeighborLoader((MyFeatureStore(), graph), [-1, -1], torch.tensor([0]), device=real_device)

    assert batch.n_id.tolist() == [0, 1, 2]
    assert batch.num_nodes == 3


def make_graph_with_a_feature(is_typed):
    """(a graph that has a `Feature` among its attributes; where it is, as a message says it)"""
    feature, edges = Feature(device="cpu").from_cpu_tensor(torch.rand(50, 8)), torch.arange(50).repeat(2, 1)
    if not is_typed:
        return Data(x=feature, edge_index=edges, num_nodes=50), "data.x"
    data = HeteroData()
    data["paper"].x, data["paper"].num_nodes, data["paper", "cites", "paper"].edge_index = feature, 50, edges
    return data, r"data\['paper'\].x"


@pytest.mark.parametrize("is_typed", [False, True])
@pytest.mark.parametrize("options", [{}, {"disjoint": True}])
def test_a_feature_among_the_attributes_of_a_graph_is_refused(is_typed, options):
    data, name = make_graph_with_a_feature(is_typed)
    nodes, links = ("paper", ("paper", "cites", "paper")) if is_typed else (None, None)

    for make in (lambda: NeighborLoader(data, [5], nodes, device="cpu", **options),
                 lambda: LinkNeighborLoader(data, [5], links, device="cpu", **options)):  # fmt: skip
        with pytest.raises(ArgumentTypeError, match=f"{name} must be a tensor, got a Feature: put it in a store"):
            make()


@pytest.mark.parametrize("is_typed", [False, True])
def test_a_feature_that_an_edit_brought_is_refused_by_the_next_epoch(is_typed):
    data, name = make_graph_with_a_feature(is_typed)
    part = data["paper"] if is_typed else data
    feature, part.x = part.x, torch.rand(50, 8)
    loader = NeighborLoader(data, [5], "paper" if is_typed else None, device="cpu")

    part.x = feature

    with pytest.raises(ArgumentTypeError, match=f"{name} must be a tensor, got a Feature"):
        next(iter(loader))


def test_what_the_message_about_a_feature_says_gives_its_rows():
    data, _ = make_graph_with_a_feature(is_typed=False)
    store = FeatureStore("cpu")

    store[None, "x", None] = data.x
    graph = store, Data(edge_index=data.edge_index, num_nodes=50)

    batch = next(iter(NeighborLoader(graph, [5], torch.arange(10), batch_size=4, device="cpu")))
    assert torch.equal(batch.x, data.x[batch.n_id])


def test_the_wrong_one_of_a_pair_is_named():
    edges = torch.arange(50).repeat(2, 1)
    topology, graph = CSRTopo(edges, num_nodes=50), Data(edge_index=edges, num_nodes=50)

    with pytest.raises(ArgumentTypeError, match="got tuple of 2, whose second is a CSRTopo and no GraphStore"):
        NeighborLoader((FeatureStore("cpu"), topology), [5], device="cpu")
    with pytest.raises(ArgumentTypeError, match="got tuple of 2, whose first is a Tensor and no FeatureStore"):
        NeighborLoader((torch.rand(50, 8), graph), [5], device="cpu")
    with pytest.raises(ArgumentTypeError, match="got tuple of 3"):
        NeighborLoader((1, 2, 3), [5], device="cpu")


@pytest.mark.parametrize(
    ("key", "words"),
    [("x", r"got 'x' of \[\(None, 'x'\)\]; rows of a graph without types are store\[None, 'x', None\]"),
     ("paper", r"got 'paper'"), (("paper", "x"), r"got \('paper', 'x'\)"), ((None, "y"), r"got \(None, 'y'\)"),
     (("x", None), r"got \('x', None\) .*store\[None, 'x', None\]"), (("paper", "x", None), "key must begin with")],
)  # fmt: skip
def test_a_key_that_names_nothing_is_told(key, words):
    store = FeatureStore("cpu")
    store[None, "x", None] = torch.rand(3, 2)

    with pytest.raises(KeyError, match=words):
        store[key]


def test_a_store_without_tables_gives_no_view_of_them():
    with pytest.raises(KeyError, match=r"got 'x' of \[\]; rows .* are store\[None, 'x', None\]"):
        FeatureStore("cpu")["x"]


def test_views_of_what_is_there_are_as_in_pyg():
    store, rows = FeatureStore("cpu"), torch.rand(3, 2)
    store["paper", "x"] = rows

    assert torch.equal(store["paper"].x(), rows)
    assert torch.equal(store["paper"]["x"](), rows)
    assert torch.equal(store["paper", "x"](), rows)
    assert torch.equal(store["paper", "x", None], rows)


@pytest.mark.parametrize("key", ["x", ("x",)])
def test_a_table_is_not_put_without_its_name(key):
    store = FeatureStore("cpu")

    with pytest.raises(ArgumentError, match=r"key must be \(group, name, None\), .*: .* by store\[None, 'x', None\] ="):
        store[key] = torch.rand(3, 2)

    assert store.get_all_tensor_attrs() == []
