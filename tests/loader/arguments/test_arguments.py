"""What is wrong with an argument is said when the object is made: which argument, what it must be, what it is."""

import re
import warnings

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import ZipLoader
from torch_geometric.sampler import EdgeSamplerInput, NodeSamplerInput

import pyg_direct
from pyg_direct import (
    CSRTopo,
    DeviceConfig,
    Feature,
    FeatureStore,
    Producers,
    RandomNegativeSampler,
    accelerate,
    count_reads,
    expected_reads,
    save_rows,
    to_edge_index,
    to_unified,
)
from pyg_direct.datasets import synthetic_graph
from pyg_direct.distributed import DistGraph
from pyg_direct.errors import ArgumentError, ArgumentTypeError, LoaderWarning, PygDirectError
from pyg_direct.loader import (
    HGTLoader,
    LinkLoader,
    LinkNeighborLoader,
    NeighborLoader,
    NeighborSampler as LayerSampler,
    NodeLoader,
    ShaDowKHopSampler,
)
from pyg_direct.sampler import NeighborSampler

EDGES = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])


def plain():
    return Data(x=torch.rand(4, 2), edge_index=EDGES)


def typed():
    data = HeteroData()
    data["a"].x = torch.rand(4, 2)
    data["a", "to", "a"].edge_index = EDGES
    return data


def make_neighbor(**options):
    return NeighborLoader(plain(), **{"num_neighbors": [2], "device": "cpu", **options})


def make_typed(**options):
    return NeighborLoader(typed(), **{"num_neighbors": [2], "input_nodes": "a", "device": "cpu", **options})


def make_link(**options):
    return LinkNeighborLoader(plain(), **{"num_neighbors": [2], "device": "cpu", **options})


def make_typed_link(**options):
    return LinkNeighborLoader(typed(), **{"num_neighbors": [2], "edge_label_index": ("a", "to", "a"), "device": "cpu",
                                          **options})  # fmt: skip


def make_sampler(**options):
    return NeighborSampler(plain(), **{"num_neighbors": [2], "device": "cpu", **options})


def make_hgt(**options):
    return HGTLoader(typed(), **{"num_samples": [2], "input_nodes": "a", "device": "cpu", **options})


def make_shadow(**options):
    return ShaDowKHopSampler(plain(), **{"depth": 1, "num_neighbors": 2, "device": "cpu", **options})


def make_layers(**options):
    return LayerSampler(EDGES, **{"sizes": [2], "device": "cpu", **options})


SWITCHES = [(make_neighbor, ("replace", "disjoint", "directed", "layer_dependency", "shuffle")),
            (make_typed, ("replace", "disjoint", "directed", "is_sorted", "shuffle")),
            (make_link, ("replace", "disjoint", "directed", "is_sorted", "strict_negatives")),
            (make_sampler, ("replace", "disjoint", "directed", "is_sorted", "strict_negatives")),
            (make_hgt, ("is_sorted", "shuffle")), (make_shadow, ("replace",)),
            (make_layers, ("return_e_id",))]  # fmt: skip


@pytest.mark.parametrize(("make", "names"), SWITCHES)
@pytest.mark.parametrize("value", ["no", 0.5, 2, torch.ones(3), object()])
def test_a_switch_is_true_or_false(make, names, value):
    for name in names:
        with pytest.raises(ArgumentTypeError, match=f"{name} must be True or False, got"):
            make(**{name: value})


@pytest.mark.parametrize("value", [True, False, np.bool_(True), np.int64(1), 0, 1, None])
def test_forms_of_switches_that_pyg_takes_are_taken(value):
    assert make_neighbor(replace=value).node_sampler.replace is bool(value)


@pytest.mark.parametrize("make", [make_neighbor, make_typed, make_link, make_layers])
@pytest.mark.parametrize("value", [3, "x", [1]])
def test_transforms_are_functions(make, value):
    names = ["transform"] if make is make_layers else ["transform", "transform_sampler_output"]
    for name in names:
        with pytest.raises(ArgumentTypeError, match=re.escape(f"{name} must be callable or None, got {value!r}")):
            make(**{name: value})


@pytest.mark.parametrize(("make", "options", "error", "words"), [
    (make_neighbor, {"num_neighbors": [2**63]}, ArgumentError, r"num_neighbors must hold values of at most 2\*\*62"),
    (make_neighbor, {"num_neighbors": {"a": [1]}}, ArgumentError, "num_neighbors must be by relation: .*'a'"),
    (make_typed, {"num_neighbors": {("a", "to", "a"): [0.5]}}, ArgumentTypeError,
     r"num_neighbors\[\('a', 'to', 'a'\)\] must hold integers, got 0.5"),
    (make_typed, {"time_attr": ["t"]}, ArgumentTypeError, r"time_attr must be the name of an attribute, got \['t'\]"),
    (make_typed, {"weight_attr": 3}, ArgumentTypeError, "weight_attr must be the name of an attribute, got 3"),
    (make_typed, {"topology_cache": "1M"}, ArgumentError, "topology_cache='1M' needs a Data that is sampled uniformly"),
    (make_typed_link, {"topology_cache": "1M"}, ArgumentError, "topology_cache='1M' needs a Data that is sampled"),
    (make_typed, {"custom_cls": 3}, ArgumentTypeError, "custom_cls must be callable or None, got 3"),
    (make_typed, {"super_batch": 2**31}, ArgumentError, r"super_batch must be below 2\*\*31, got 2147483648"),
    (make_neighbor, {"neighbor_sampler": 3}, ArgumentTypeError, "neighbor_sampler must have sample_from_nodes"),
    (make_link, {"neighbor_sampler": 3}, ArgumentTypeError, "neighbor_sampler must have sample_from_edges"),
    (make_neighbor, {"num_workers": -1}, ArgumentError, "num_workers must be an integer of at least 0, got -1"),
    (make_neighbor, {"num_workers": "2"}, ArgumentError, "num_workers must be an integer of at least 0, got '2'"),
    (make_neighbor, {"generator": 5}, ArgumentTypeError, "generator must be a torch.Generator or None, got int"),
    (make_neighbor, {"sampler": 5}, ArgumentTypeError, "sampler must be iterable or None, got int"),
    (make_neighbor, {"batch_sampler": 5}, ArgumentTypeError, "batch_sampler must be iterable or None, got int"),
    (make_link, {"neg_sampling_ratio": "2"}, ArgumentError, "neg_sampling_ratio must be at least 0, got '2'"),
    (make_link, {"neg_sampling_ratio": float("inf")}, ArgumentError, "neg_sampling_ratio must be at least 0, got inf"),
    (make_link, {"neg_sampling": {"mode": "binary", "amount": float("nan")}}, ArgumentError, "neg_sampling .*finite"),
    (make_link, {"exclude_target_edges": torch.ones(2)}, ArgumentError, "exclude_target_edges must be False, True"),
    (make_typed_link, {"edge_label_index": (1, 2)}, ArgumentTypeError, "edge_label_index must name a relation, got 1"),
    (make_sampler, {"placement": "nowhere"}, ArgumentError, "placement must be one of .*, got 'nowhere'"),
    (make_sampler, {"placement": "unified"}, ArgumentError, "placement must be one that device=cpu can read"),
    (make_sampler, {"topology_cache": "much"}, ArgumentError, "topology_cache must look like .*, got 'much'"),
    (make_hgt, {"num_samples": None}, ArgumentTypeError, "num_samples must be a list of integers, got None"),
    (make_hgt, {"num_samples": 3}, ArgumentTypeError, "num_samples must be a list of integers, got 3"),
    (make_hgt, {"most_neighbors": 0}, ArgumentError, "most_neighbors must be -1 or at least 1, got 0"),
    (make_hgt, {"most_neighbors": 2**70}, ArgumentError, r"most_neighbors must hold values of at most 2\*\*62"),
    (make_shadow, {"depth": 2**63}, ArgumentError, r"depth must be an integer in \[0, 31\], got 9223372036854775808"),
    (make_neighbor, {"input_nodes": ["a", "b"]}, ArgumentTypeError, "got .'a', 'b'.: node types are those of a Hetero"),
    (make_link, {"edge_label_index": (("a", "to", "b"), EDGES)}, ArgumentTypeError, "relations are those of a Hetero"),
    (make_link, {"edge_label_index": torch.ones(4, dtype=torch.bool)}, ArgumentError, r"give edge_index\[:, mask\]"),
    (make_link, {"edge_label_index": EDGES.t()}, ArgumentError, r"shape \[2, L\], got .*: give its .t\(\)"),
    (make_link, {"edge_label_index": (EDGES[0], EDGES[1][:1])}, ArgumentError, "as many sources as targets, got"),
    (make_shadow, {"node_idx": "all"}, ArgumentTypeError, "node_idx must be ids or a mask, got 'all'"),
    (make_shadow, {"node_idx": torch.tensor([4])}, ArgumentError, r"node_idx must lie in \[0, 4\), got 4"),
    (make_shadow, {"node_idx": torch.ones(3, dtype=torch.bool)}, ArgumentError, r"node_idx must have shape \[4\]"),
    (make_layers, {"node_idx": "all"}, ArgumentTypeError, "node_idx must be ids or a mask, got 'all'"),
    (make_neighbor, {"num_neighbors": 2}, ArgumentTypeError, "list of integers, got 2: give one for each hop, such as"),
    (make_layers, {"node_idx": True}, ArgumentError, "node_idx must have one dimension"),
    (make_layers, {"placement": ["cpu"]}, ArgumentError, r"placement must be one of .*, got \['cpu'\]"),
])  # fmt: skip
def test_bad_arguments_are_named(make, options, error, words):
    with pytest.raises(error, match=words):
        make(**options)


@pytest.mark.parametrize(("make", "error", "words"), [
    (lambda: NodeLoader(None, make_sampler()), ArgumentTypeError, "data must be a Data, a HeteroData or a tuple"),
    (lambda: LinkLoader(None, make_sampler()), ArgumentTypeError, "data must be a Data, a HeteroData or a tuple"),
    (lambda: NeighborLoader([plain()], [2]), ArgumentTypeError, r"list of 1: give one of its graphs, .* data\[0\]"),
    (lambda: NodeLoader(plain(), None), ArgumentTypeError, "node_sampler must have sample_from_nodes, .*got NoneType"),
    (lambda: LinkLoader(plain(), None), ArgumentTypeError, "link_sampler must have sample_from_edges, .*got NoneType"),
    (lambda: Feature(rank="first", device="cpu"), ArgumentTypeError, "rank must be the index of a GPU, got 'first'"),
    (lambda: Feature(device_list=3, device="cpu"), ArgumentTypeError, "device_list must hold GPU indices"),
    (lambda: Feature(device_group_list=[3], device="cpu"), ArgumentTypeError, "device_group_list must hold GPU"),
    (lambda: Feature(device_group_list=3, device="cpu"), ArgumentTypeError, "device_group_list must be a list"),
    (lambda: FeatureStore("cpu", placement="attic"), ArgumentError, "placement must be 'unified' or 'pinned'"),
    (lambda: FeatureStore("cpu", device_cache_size="much"), ArgumentError, "device_cache_size must look like"),
    (lambda: CSRTopo(EDGES, eid=torch.arange(4)), ArgumentError, "eid needs indptr and indices"),
    (lambda: CSRTopo(EDGES, num_nodes=2**63), ArgumentError, r"num_nodes must be below 2\*\*62"),
    (lambda: RandomNegativeSampler(EDGES, num_nodes="4", device="cpu"), ArgumentError, "num_nodes must be an int"),
    (lambda: count_reads([torch.rand(3)], 3), ArgumentTypeError, "batches must have dtype int64 or int32"),
    (lambda: count_reads([[1]], 3), ArgumentTypeError, "batches must be a tensor, got list"),
    (lambda: count_reads([], -1), ArgumentError, r"num_rows must be an integer in \[0, 2\*\*62\), got -1"),
    (lambda: expected_reads(EDGES[0], EDGES[1], None, [2], 1), ArgumentTypeError, "input_nodes must be a tensor"),
    (lambda: expected_reads(EDGES[1], EDGES[0], EDGES[0], [2], 1), ArgumentError, "indptr must run from 0 to"),
    (lambda: to_edge_index(None), ArgumentTypeError, "batch must be a Data or a HeteroData, got NoneType"),
    (lambda: Producers(make_neighbor(), None), ArgumentTypeError, "devices must be a list of devices"),
    (lambda: Producers(make_neighbor(), threads=0), ArgumentError, "threads must be an integer of at least 1 or None"),
    (lambda: to_unified(EDGES.to_sparse()), ArgumentTypeError, "tensor must be dense, got layout torch.sparse_coo"),
    (lambda: to_unified(EDGES, propagatedToCUDA="x"), ArgumentTypeError, "propagatedToCUDA must be True or False"),
    (lambda: accelerate(None), ArgumentTypeError, "model must be a torch.nn.Module, got NoneType"),
    (lambda: save_rows(None, EDGES), ArgumentTypeError, "path must be the name of a file, got None"),
    (lambda: Feature(device="cpu").from_file(5), ArgumentTypeError, "path must be the name of a file, got 5"),
    (lambda: Feature(device="cpu").from_mmap(None, DeviceConfig(None, EDGES)), ArgumentTypeError, "gpu_parts must be"),
    (lambda: RandomNegativeSampler([[0], [1]], device="cpu"), ArgumentTypeError, "graph must be a tensor"),
])  # fmt: skip
def test_bad_arguments_of_other_classes_are_named(make, error, words):
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize("make", [plain, typed])
def test_edges_of_a_graph_are_a_tensor(make):
    data = make()
    data.edge_stores[0].edge_index = EDGES.numpy()
    with pytest.raises(ArgumentTypeError, match=r"edge_index must be a tensor.*, got ndarray"):
        next(iter(NeighborLoader(data, [2], "a" if make is typed else None, device="cpu")))


def test_a_sampler_refuses_what_it_cannot_sample_around():
    sampler = make_sampler()
    with pytest.raises(ArgumentError, match="edge_label_index must have as many sources as targets, got 3 and 2"):
        sampler.sample_from_edges(EdgeSamplerInput(None, torch.arange(3), torch.arange(2)))
    with pytest.raises(ArgumentError, match="input_type must be None for a graph without types, got 'a'"):
        sampler.sample_from_nodes(NodeSamplerInput(None, torch.arange(3), input_type="a"))


def set_and_sample(sampler, name, value, around):
    setattr(sampler, name, value)
    return sampler.sample_from_nodes(around, key=1)


@pytest.mark.parametrize(("name", "value"), [
    ("num_neighbors", [-3]), ("subgraph_type", "none"), ("disjoint", "no"), ("replace", "no"),
    ("temporal_strategy", "first"), ("time_window", -1),
])  # fmt: skip
def test_a_sampler_goes_on_after_a_bad_value(name, value):
    sampler, around = make_sampler(), NodeSamplerInput(None, torch.arange(3))
    expected, good = sampler.sample_from_nodes(around, key=1), getattr(sampler, name)
    with pytest.raises(PygDirectError, match=name):
        set_and_sample(sampler, name, value, around)

    got = set_and_sample(sampler, name, good, around)

    assert torch.equal(got.node, expected.node)


def test_graphs_of_their_own_are_zipped():
    loader = make_shadow(seed=3)

    (pair,) = ZipLoader([loader, make_neighbor()], batch_size=4)

    assert pair[0].root_n_id.numel() == pair[1].batch_size == 4
    assert pair[0].n_id[pair[0].root_n_id].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int16])
def test_no_seeds_of_any_type_are_an_empty_epoch_as_in_pyg(dtype):
    nodes, links = torch.empty(0, dtype=dtype), torch.empty(2, 0, dtype=dtype)

    assert list(make_neighbor(input_nodes=nodes)) == []
    assert list(make_neighbor(input_nodes=nodes, shuffle=True)) == []
    assert list(make_typed(input_nodes=("a", nodes))) == []
    assert list(make_link(edge_label_index=links)) == []
    assert list(make_link(edge_label_index=links, shuffle=True, neg_sampling="binary")) == []


def test_a_mask_without_a_node_is_a_mask_all_the_same():
    with pytest.raises(ArgumentError, match=r"input_nodes must have shape \[4\] as a mask, got \[0\]"):
        make_neighbor(input_nodes=torch.empty(0, dtype=torch.bool))


# Each with arguments that a graph would be right with.
LOADERS = {
    "NeighborLoader": lambda data: NeighborLoader(data, [2], device="cpu"),
    "LinkNeighborLoader": lambda data: LinkNeighborLoader(data, [2], device="cpu"),
    "HGTLoader": lambda data: HGTLoader(data, [2], "a", device="cpu"),
    "ShaDowKHopSampler": lambda data: ShaDowKHopSampler(data, 2, 2, device="cpu"),
    "SubGraphLoader": lambda data: pyg_direct.SubGraphLoader(data, [2], device="cpu"),
    "RandomNodeLoader": lambda data: pyg_direct.RandomNodeLoader(data, 2, device="cpu"),
    "ClusterData": lambda data: pyg_direct.ClusterData(data, 2),
    "GraphSAINTNodeSampler": lambda data: pyg_direct.GraphSAINTNodeSampler(data, 2, device="cpu"),
    "PPRLoader": lambda data: pyg_direct.PPRLoader(data, 2, device="cpu"),
    "inference_loader": lambda data: pyg_direct.inference_loader(data, device="cpu"),
}
# In place of a graph, and what to do about it.
OTHERS = {
    "list": (lambda: [plain()], r"got list of 1: give one of its graphs, such as data\[0\]; .* take DataLoader"),
    "list of two": (lambda: [plain(), plain()], r"got list of 2: give one of its graphs"),
    "tuple of two": (lambda: (plain(), plain()), r"got tuple of 2: give one of its graphs"),
    "tuple of three": (lambda: (plain(), plain(), plain()), r"got tuple of 3: give one of its graphs"),
    "typed": (lambda: [typed(), typed()], r"got list of 2: give one of its graphs"),
    "parts": (lambda: object.__new__(DistGraph), "got DistGraph: a graph in parts is for DistNeighborLoader"),
    "data set": (lambda: synthetic_graph("products", scale=1e-5), r"got NodeDataset: give its to_data\(\)"),
    "store": (lambda: FeatureStore("cpu"), r"got FeatureStore: give \(store, Data\(edge_index=..., num_nodes=...\)\)"),
    "edges": (lambda: EDGES, r"got Tensor: give Data\(edge_index=..., num_nodes=...\)"),
    "path": (lambda: "graph.pt", "got str: load the graph first"),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("loader", LOADERS)
def test_what_is_no_graph_is_told_with_what_to_give(loader, other):
    make, words = OTHERS[other]

    with pytest.raises((ArgumentTypeError, NotImplementedError), match=rf"data must be .*, {words}"):
        LOADERS[loader](make())


def test_two_stores_may_both_be_graphs_of_pyg():
    rows, both = HeteroData(), typed()
    rows["a"].x = torch.rand(4, 2)

    for data in ((rows, both), (both, both)):
        batch = next(iter(NeighborLoader(data, [2], ("a", torch.arange(2)), device="cpu")))
        assert torch.equal(batch["a"].x, data[0]["a"].x[batch["a"].n_id])


@pytest.mark.parametrize(("make", "name"), [
    (lambda size: make_neighbor(feature_cache=size), "feature_cache"),
    (lambda size: make_neighbor(topology_cache=size), "topology_cache"),
    (lambda size: make_link(feature_cache=size), "feature_cache"),
    (lambda size: Feature(device_cache_size=size, device="cpu"), "device_cache_size"),
    (lambda size: Feature(host_cache_size=size, device="cpu"), "host_cache_size"),
    (lambda size: FeatureStore("cpu", device_cache_size=size), "device_cache_size"),
    (lambda size: NeighborSampler(plain(), [2], device="cpu", topology_cache=size), "topology_cache"),
    (lambda size: CSRTopo(EDGES, num_nodes=4).place("cpu", "cpu", topology_cache=size), "topology_cache"),
])  # fmt: skip
def test_sizes_of_caches_say_what_was_meant(make, name):
    with pytest.warns(LoaderWarning, match=f"{name}=20 means 20 bytes.* write '20%' for a share, '20MB' or '20GB'"):
        make(20)
    with pytest.raises(ArgumentTypeError, match=rf"{name} must be .*, got 0\.2: write '20%' for a share"):
        make(0.2)
    with pytest.raises(ArgumentError, match=f"{name} must have a unit .*, got '0.2': write '20%', '0.2MB'"):
        make("0.2")


def test_installed_loaders_say_what_was_meant():
    try:
        with pytest.warns(LoaderWarning, match="feature_cache=20 means 20 bytes"):
            pyg_direct.install(device="cpu", feature_cache=20)
    finally:
        pyg_direct.uninstall()


def test_a_small_graph_asks_for_no_bytes_of_its_own():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(iter(make_neighbor(feature_cache="20%")))
