"""Every option of every loader: it acts, it is refused, or it is said to have no use; none is dropped in silence.

Options come from the signatures, so that a new one without an entry fails here.
"""

import inspect
import os
import time
import warnings
from tempfile import TemporaryDirectory

import pytest
import torch
from torch_geometric.data import Data, TemporalData
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput

from pyg_direct import (
    ClusterData,
    ClusterLoader,
    DataListLoader,
    DataLoader,
    DenseDataLoader,
    FeatureStore,
    GraphSAINTEdgeSampler,
    GraphSAINTNodeSampler,
    GraphSAINTRandomWalkSampler,
    HGTLoader,
    LinkLoader,
    LinkNeighborLoader,
    NeighborLoader,
    Node2Vec,
    NodeLoader,
    PPRLoader,
    RandomNodeLoader,
    ShaDowKHopSampler,
    SubGraphLoader,
    TemporalDataLoader,
    inference_loader,
)
from pyg_direct.distributed import DistLinkNeighborLoader, DistNeighborLoader, DistSubGraphLoader
from pyg_direct.distributed.server.client_graph import ClientGraph
from pyg_direct.errors import LoaderWarning, PygDirectError
from pyg_direct.loader import NeighborSampler as LayerSampler
from pyg_direct.loader.walk_models import WalkLoader
from pyg_direct.ops.argument_checks import list_options
from pyg_direct.sampler import NeighborSampler
from tests.batches import make_data
from tests.distributed.ranks import write_data
from tests.distributed.server.client_graph.test_client import ServersHere
from tests.hetero_data import make_hetero
from tests.loader.data_loader.small_graphs import make_molecules
from tests.options import Refused, Seen, look

MOLECULES = make_molecules(30)
DENSE = [Data(x=torch.full((4, 2), number)) for number in range(30)]
SIGNALS = [Data(x=torch.rand(3, 1), edge_index=torch.tensor([[0, 1], [1, 2]])) for _ in range(7)]
SEEDS, LINKS = torch.arange(0, 60, 2), torch.arange(40).view(2, 20)
TIMES = torch.arange(70) % 50
PLAIN = {}
COMMON = {"batch_size": 7, "seed": 1, "device": "cpu"}
DRAWN = {"batch_size": 9, "num_steps": 4, "seed": 1, "device": "cpu", "log": False}


def make_graph():
    data = make_data(time=TIMES, weight=torch.arange(600) % 5 + 0.5, train_mask=torch.arange(70) % 2 == 0)
    data.x = data.x + torch.rand(70, 5, generator=torch.Generator().manual_seed(0))
    return data


DATA, TYPED = make_graph(), make_hetero()
TYPED["paper"].x = torch.rand(TYPED["paper"].num_nodes, 5, generator=torch.Generator().manual_seed(0))
CLUSTERS = ClusterData(DATA, 20, log=False)
EVENTS = TemporalData(src=torch.arange(60) % 9, dst=torch.arange(60) % 11, t=torch.arange(60))
WALKS = Node2Vec(DATA.edge_index, 4, 5, 3, num_nodes=70, device="cpu", seed=1)


def sampler_of(**options):
    return NeighborSampler(DATA, [3, 2], device="cpu", seed=1, **options)


# How each loader is made of its options; those of `COMMON` but where they are given.
MAKE = {
    "NeighborLoader": lambda **options: NeighborLoader(**{"data": DATA, "num_neighbors": [3, 2], "input_nodes": SEEDS,
                                                          **COMMON, **options}),
    "SubGraphLoader": lambda **options: SubGraphLoader(**{"data": DATA, "num_neighbors": [3, 2], "input_nodes": SEEDS,
                                                          **COMMON, **options}),
    "LinkNeighborLoader": lambda **options: LinkNeighborLoader(**{
        "data": DATA, "num_neighbors": [3, 2], "edge_label_index": LINKS, **COMMON, **options}),
    "NodeLoader": lambda **options: NodeLoader(**{"data": DATA, "node_sampler": sampler_of(), "input_nodes": SEEDS,
                                                  **COMMON, **options}),
    "LinkLoader": lambda **options: LinkLoader(**{"data": DATA, "link_sampler": sampler_of(),
                                                  "edge_label_index": LINKS, **COMMON, **options}),
    "HGTLoader": lambda **options: HGTLoader(**{"data": TYPED, "num_samples": [4, 4], "input_nodes": "paper",
                                                **COMMON, **options}),
    "ShaDowKHopSampler": lambda **options: ShaDowKHopSampler(**{"data": DATA, "depth": 2, "num_neighbors": 3,
                                                                "node_idx": SEEDS, **COMMON, **options}),
    "NeighborSampler": lambda **options: LayerSampler(**{"edge_index": DATA.edge_index, "sizes": [3, 2],
                                                         "node_idx": SEEDS, **COMMON, **options}),
    "DataLoader": lambda **options: DataLoader(**{"dataset": MOLECULES, **COMMON, **options}),
    "DenseDataLoader": lambda **options: DenseDataLoader(**{"dataset": DENSE, **COMMON, **options}),
    "DataListLoader": lambda **options: DataListLoader(**{"dataset": MOLECULES, "batch_size": 7, "seed": 1, **options}),
    "TemporalDataLoader": lambda **options: TemporalDataLoader(**{"data": EVENTS, "neg_sampling_ratio": 1.0, **COMMON,
                                                                  **options}),
    "ClusterLoader": lambda **options: ClusterLoader(**{"cluster_data": CLUSTERS, **COMMON, **options}),
    "PPRLoader": lambda **options: PPRLoader(**{"data": DATA, "num_neighbors": 5, "input_nodes": SEEDS, "num_walks": 8,
                                                **COMMON, **options}),
    "RandomNodeLoader": lambda **options: RandomNodeLoader(**{"data": DATA, "num_parts": 9, "seed": 1, "device": "cpu",
                                                              **options}),
    "GraphSAINTNodeSampler": lambda **options: GraphSAINTNodeSampler(**{"data": DATA, **DRAWN, **options}),
    "GraphSAINTEdgeSampler": lambda **options: GraphSAINTEdgeSampler(**{"data": DATA, **DRAWN, **options}),
    "GraphSAINTRandomWalkSampler": lambda **options: GraphSAINTRandomWalkSampler(**{"data": DATA, "walk_length": 2,
                                                                                   **DRAWN, **options}),
    "WalkLoader": lambda **options: WalkLoader(**{"walks": WALKS, "num_nodes": 60, **COMMON, **options}),
    "inference_loader": lambda **options: inference_loader(**{"data": DATA, **COMMON, **options}),
}  # fmt: skip


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts") / "p"
    write_data(folder, DATA, 2, times=True, weights=True)
    return ServersHere(folder)


def make_dist(kind, parts):
    alone = ClientGraph(parts, device="cpu")

    def make(**options):
        client = options.pop("client", None)
        graph = alone if client is None else ClientGraph(parts, device="cpu", client=client)
        own = {"graph": graph, "num_neighbors": [2, 1], "batch_size": 12, "seed": 1, **options}
        if kind is DistLinkNeighborLoader:
            return kind(**{"edge_label_index": LINKS, **own})
        return kind(**{"input_nodes": SEEDS, **own})

    return make


def look_plain(make, base):
    """Batches without an option; those of a loader without any are made once."""
    if base:
        return look(make(**base))
    if make not in PLAIN:
        PLAIN[make] = look(make())
    return PLAIN[make]


class Differs:
    """Batches with an option differ from those without; `base` is given to both."""

    def __init__(self, value, **base):
        self.value, self.base = value, base

    def check(self, make, name):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            loader = make(**self.base, **{name: self.value})
        assert look(loader) != look_plain(make, self.base)


class RefusedByTorch(Refused):
    """An option that torch's DataLoader refuses."""

    errors = (ValueError,)


class Said:
    """An option of PyG or torch that changes nothing, which is said once."""

    def __init__(self, value, **base):
        self.value, self.base = value, base

    def check(self, make, name):
        with pytest.warns(LoaderWarning, match=name) as said:
            loader = make(**self.base, **{name: self.value})
        assert len(said) == 1
        assert look(loader) == look_plain(make, self.base)


class Told:
    """The same where batches take long."""

    def __init__(self, said):
        self.said = said

    def check(self, make, name):
        with pytest.warns(LoaderWarning, match=name):
            make(**{name: self.said.value})


class Called:
    """A function that is given is called."""

    def check(self, make, name):
        seen = []
        look(make(**{name: lambda *out: (seen.append(1), out[0] if len(out) == 1 else out)[1]}))
        assert seen


def count_ahead(loader):
    """Whether more than one batch is begun where one is asked for."""
    name = "_draw" if isinstance(loader, LayerSampler) else "_submit"
    begun, real = [], getattr(loader, name)
    setattr(loader, name, lambda *args: (begun.append(1), real(*args))[1])
    batches = iter(loader)
    next(batches)
    until = time.monotonic() + (60 if loader.prefetch else 0.05)
    while len(begun) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    batches.close()
    return len(begun) > 1


def collate(loader):
    return isinstance(loader.collate_fn(torch.tensor([0, 1])), (SamplerOutput, HeteroSamplerOutput))


# Options of torch's DataLoader.
ORDER = {"batch_size": Differs(5), "shuffle": Differs(True), "sampler": Differs([3, 0, 1]), "drop_last": Differs(True),
         "batch_sampler": RefusedByTorch([[0, 1]], "mutually exclusive"),
         "generator": Refused(5, "generator must be a torch.Generator")}  # fmt: skip
WORKERS = {"num_workers": Said(2), "persistent_workers": Said(True), "prefetch_factor": Said(3),
           "pin_memory": Said(True), "pin_memory_device": Said("cuda"), "worker_init_fn": Said(print),
           "timeout": Said(3), "multiprocessing_context": Said("spawn"), "dataset": Said([1]),
           "collate_fn": Said(print)}  # fmt: skip
if "in_order" in inspect.signature(torch.utils.data.DataLoader.__init__).parameters:
    WORKERS["in_order"] = Said(False)
TORCH = {**ORDER, **WORKERS}
# On the CPU nothing can be kept on a GPU: values are checked.
PLACES = {"device": Refused("tpu", "device must name"), "placement": Refused("cuda", "placement must be one that"),
          "feature_cache": Refused("lots", "feature_cache must look like"),
          "store_dtype": Differs(torch.float16)}  # fmt: skip
TOPOLOGY = {"topology_placement": Refused("cuda", "topology_placement must be one that")}
AHEAD = {"ahead": Refused(-1, "ahead must be a number of batches")}
EPOCHS = {"seed": Differs(2), "prefetch": Seen(count_ahead, 0, 2)}
RANKS = {"ranks": Differs((0, 2)), "uneven": Differs("drop", ranks=(1, 2))}
HOOKS = {"transform": Called(), "transform_sampler_output": Called(), "filter_per_worker": Seen(collate, True, False)}
OF_PYG = {**HOOKS, "custom_cls": Said(dict), "input_id": Differs(torch.arange(30) + 500)}
TIMED = {"time_attr": "time", "input_time": torch.full((30,), 25)}
SAMPLING = {"num_neighbors": Differs([1, 1]), "replace": Differs(True), "disjoint": Differs(True),
            "subgraph_type": Differs("induced"), "weight_attr": Differs("weight"), "directed": Differs(False),
            "temporal_strategy": Differs("last", **TIMED), "time_comparison": Differs("<", **TIMED),
            "time_window": Differs(5, **TIMED), "time_attr": Differs("time"),
            "is_sorted": Refused(True, "is_sorted", **TIMED)}  # fmt: skip
INPUTS = {"input_nodes": Differs(SEEDS + 1), "input_time": Differs(TIMES[:30] // 2, time_attr="time")}


def list_windows(count, **more):
    """Entries of the windows of so many seeds."""
    start, end = torch.full((count,), 5), torch.full((count,), 40)
    return {"input_start_time": Seen(look, start, start + 20, input_end_time=end, **more),
            "input_end_time": Seen(look, end, end - 20, input_start_time=start, **more)}  # fmt: skip


WINDOWS = list_windows(30)
LINK_TIMED = {"time_attr": "time", "edge_label_time": torch.full((20,), 25)}
LINK_INPUTS = {"edge_label_index": Differs(LINKS + 1), "edge_label": Differs(torch.arange(20)),
               "neg_sampling": Differs("triplet"), "neg_sampling_ratio": Differs(2.0)}  # fmt: skip
LINK_SAMPLING = {**{name: SAMPLING[name] for name in ("num_neighbors", "replace", "disjoint", "subgraph_type",
                                                      "weight_attr", "directed")},
                 "temporal_strategy": Differs("last", **LINK_TIMED), "time_comparison": Differs("<", **LINK_TIMED),
                 "time_window": Differs(5, **LINK_TIMED),
                 "time_attr": Refused("time", "edge_label_time and time_attr must be given together"),
                 "is_sorted": Refused(True, "is_sorted", **LINK_TIMED),
                 "edge_label_time": Seen(look, torch.full((20,), 9), torch.full((20,), 25), time_attr="time"),
                 "strict_negatives": Differs(True, neg_sampling={"mode": "binary", "amount": 40}),
                 "exclude_target_edges": Differs(True, edge_label_index=DATA.edge_index[:, :20]),
                 "rev_edge_type": Refused(("a", "to", "b"), "rev_edge_type must be None"),
                 "sampling": Differs("labor"), "layer_dependency": Differs(True, sampling="labor")}  # fmt: skip
NEIGHBOR = {**INPUTS, **list_windows(30, time_attr="time"), **SAMPLING, **OF_PYG, **PLACES, **TOPOLOGY, **EPOCHS,
            **AHEAD, **RANKS, **TORCH,
            "neighbor_sampler": Differs(sampler_of(replace=True)),
            "topology_cache": Refused("lots", "topology_cache must look like"), "sampling": Differs("labor"),
            "layer_dependency": Differs(True, sampling="labor"),
            "super_batch": Refused(0, "super_batch must be an integer of at least 1"),
            "cache_policy": Refused("some", "cache_policy must be one of"),
            "cold_policy": Refused("pinned", "needs a cache_policy"), "hotness": Refused("x", "hotness must be one of"),
            "presample": Refused(2, "needs hotness='frequency'")}  # fmt: skip
OF_LINKS = {**OF_PYG, "input_id": Differs(torch.arange(20) + 500)}


FOLDER = TemporaryDirectory()


def has_file(sampler):
    """Whether a sampler has saved its norms."""
    return sampler.save_dir is not None and os.path.exists(os.path.join(sampler.save_dir, sampler._filename))


SAINT = {**PLACES, **TOPOLOGY, **EPOCHS, **RANKS, **TORCH,
         "uneven": Differs("drop", ranks=(1, 2), num_steps=3),
         "shuffle": Said(True), "drop_last": Said(True),
         "batch_sampler": Differs([[3], [0]]), "num_steps": Differs(3), "sample_coverage": Differs(2),
         "save_dir": Seen(has_file, None, FOLDER.name, sample_coverage=1),
         "log": Refused(3, "log must be")}  # fmt: skip
LOADERS = {
    "NeighborLoader": (NeighborLoader, NEIGHBOR),
    "SubGraphLoader": (SubGraphLoader, {
        **NEIGHBOR, "subgraph_type": Refused("directional", "must be 'induced'"),
        "topology_cache": Refused("9B", "needs a Data"),
        "directed": Refused(3, "directed"), "neighbor_sampler": Differs(sampler_of())}),
    "LinkNeighborLoader": (LinkNeighborLoader, {
        **LINK_INPUTS, **list_windows(20, time_attr="time"), **LINK_SAMPLING, **OF_LINKS, **PLACES, **TOPOLOGY,
        **EPOCHS, **AHEAD, **RANKS, **TORCH,
        "neighbor_sampler": Differs(sampler_of(replace=True)),
        "topology_cache": Refused("lots", "topology_cache must look like"), "super_batch": Refused(0, "super_batch")}),
    "NodeLoader": (NodeLoader, {
        **OF_PYG, **WINDOWS, **PLACES, **EPOCHS, **AHEAD, **RANKS, **TORCH,
        "node_sampler": Differs(sampler_of(replace=True)), "input_nodes": Differs(SEEDS + 1),
        "input_time": Differs(TIMES[:30])}),
    "LinkLoader": (LinkLoader, {
        **LINK_INPUTS, **list_windows(20), **OF_LINKS, **PLACES, **EPOCHS, **AHEAD, **RANKS, **TORCH,
        "link_sampler": Differs(sampler_of(replace=True)), "edge_label_time": Differs(TIMES[:20])}),
    "HGTLoader": (HGTLoader, {
        **HOOKS, **PLACES, **TOPOLOGY, **EPOCHS, **TORCH, **AHEAD, "num_samples": Differs([1, 1]),
        "input_nodes": Differs("author"), "is_sorted": Refused(3, "is_sorted"), "most_neighbors": Differs(1)}),
    "ShaDowKHopSampler": (ShaDowKHopSampler, {
        **PLACES, **TOPOLOGY, **EPOCHS, **TORCH, "depth": Differs(1), "num_neighbors": Differs(1),
        "node_idx": Differs(SEEDS + 1), "replace": Differs(True)}),
    "ClusterLoader": (ClusterLoader, {
        **PLACES, **TOPOLOGY, **EPOCHS, **RANKS, **TORCH, "seed": Differs(2, shuffle=True)}),
    "PPRLoader": (PPRLoader, {
        **PLACES, **TOPOLOGY, **EPOCHS, **RANKS, **TORCH, "num_neighbors": Differs(2),
        "input_nodes": Differs(SEEDS + 1), "alpha": Differs(0.5), "num_walks": Differs(9), "walk_length": Differs(3)}),
    "RandomNodeLoader": (RandomNodeLoader, {
        **PLACES, **TOPOLOGY, **EPOCHS, **RANKS, **TORCH, "seed": Differs(2, shuffle=True), "num_parts": Differs(3),
        "batch_sampler": Differs([[3, 0], [1]]),
        "batch_size": Refused(3, "as it follows from num_parts")}),
    "GraphSAINTNodeSampler": (GraphSAINTNodeSampler, SAINT),
    "GraphSAINTEdgeSampler": (GraphSAINTEdgeSampler, SAINT),
    "GraphSAINTRandomWalkSampler": (GraphSAINTRandomWalkSampler, {**SAINT, "walk_length": Differs(4)}),
    "NeighborSampler": (LayerSampler, {
        **EPOCHS, **RANKS, **TORCH, "device": PLACES["device"], "placement": Refused("pinned", "placement must be"),
        "sizes": Differs([1, 1]), "node_idx": Differs(SEEDS + 1), "num_nodes": Refused(3, "num_nodes"),
        "return_e_id": Differs(False), "transform": Called()}),
    "DataLoader": (DataLoader, {
        **EPOCHS, **RANKS, **TORCH, "device": PLACES["device"], "placement": PLACES["placement"],
        "dataset": Differs(MOLECULES[1:]), "follow_batch": Differs(["x"]), "exclude_keys": Differs(["x"]),
        "static_graph": Differs(True, dataset=SIGNALS), "seed": Differs(2, shuffle=True)}),
    "TemporalDataLoader": (TemporalDataLoader, {
        **EPOCHS, **TORCH, "device": PLACES["device"], "placement": PLACES["placement"],
        "neg_sampling_ratio": Differs(0.5), "shuffle": Said(True), "batch_sampler": Differs([[3], [0]])}),
    "WalkLoader": (WalkLoader, {**EPOCHS, **RANKS, **TORCH, "device": PLACES["device"], "num_nodes": Differs(30)}),
    "DenseDataLoader": (DenseDataLoader, {
        **EPOCHS, **RANKS, **TORCH, "device": PLACES["device"], "placement": PLACES["placement"],
        "dataset": Differs(DENSE[1:]), "seed": Differs(2, shuffle=True)}),
    "DataListLoader": (DataListLoader, {
        **RANKS, **TORCH, "dataset": Differs(MOLECULES[1:]), "seed": Differs(2, shuffle=True)}),
}  # fmt: skip
# What is not an option, but what a loader is made of.
GIVEN = {"data", "cluster_data", "edge_index", "edge_index_dict", "graph", "self", "walks"}
# What a partitioned graph has instead, or not at all.
ELSEWHERE = {"device": Refused("cpu", "give it to DistGraph"), "placement": Refused("cpu", "give it to DistGraph"),
             "feature_cache": Refused("20%", "give DistGraph device_cache_size"),
             "store_dtype": Refused(torch.float16, "rows keep the dtype"), "custom_cls": Refused(dict, "batches of"),
             "is_sorted": Refused(True, "has no option is_sorted"), "super_batch": Refused(2, "has no option super"),
             "topology_placement": Refused("cpu", "has no option topo"), "sampling": Refused("labor", "has no option"),
             "num_workers": Refused(2, "num_workers must be 0"),
             **{name: Refused(value, f"has no option {name}") for name, value in {
                 "cache_policy": "p2p_clique_replicate", "cold_policy": "shard", "hotness": "degree", "presample": 2,
                 "topology_cache": "1K", "layer_dependency": True, "directed": False, "neighbor_sampler": sampler_of(),
                }.items()}}  # fmt: skip
DIST_EPOCHS = {"seed": Differs(2), "prefetch": Refused(-1, "prefetch must be"), "ahead": Refused(-1, "ahead must be"),
               "ranks": Differs("own"), "uneven": Differs("drop", client=(1, 2)),
               **{name: HOOKS[name] for name in HOOKS}, **ORDER,
               **{name: Told(said) for name, said in WORKERS.items()}, **ELSEWHERE,
               "sampler": Differs([3, 0, 1], ranks="own"), "batch_size": Differs(9),
               "batch_sampler": Refused([[0, 1]], "batch_sampler needs ranks='own'"),
               "generator": Refused(torch.Generator(), "generator needs ranks='own'")}  # fmt: skip
DIST_NODES = {**INPUTS, **list_windows(30, time_attr="time"),
              **{name: SAMPLING[name] for name in SAMPLING if name not in ("directed", "is_sorted")},
              "input_id": OF_PYG["input_id"], **DIST_EPOCHS}  # fmt: skip
DIST = {
    "DistNeighborLoader": (DistNeighborLoader, DIST_NODES),
    "DistSubGraphLoader": (DistSubGraphLoader, {**DIST_NODES, "subgraph_type": Refused("induced", "it is 'induced'")}),
    "DistLinkNeighborLoader": (DistLinkNeighborLoader, {
        **LINK_INPUTS, **list_windows(20, time_attr="time"),
        **{name: LINK_SAMPLING[name] for name in LINK_SAMPLING if name not in ("directed", "is_sorted")},
        **DIST_EPOCHS, "input_id": OF_LINKS["input_id"], "uneven": Differs("drop", client=(1, 2), batch_size=8)}),
}  # fmt: skip
CASES = [(name, option) for name, (_, known) in LOADERS.items() for option in known]


def list_all(kind):
    """Options of a loader, those that it hands on among them."""
    own = set(list_options(kind)) if inspect.isclass(kind) else set(inspect.signature(kind).parameters)
    return (own | set(list_options(torch.utils.data.DataLoader)) if inspect.isclass(kind) else own) - GIVEN - {
        "options", "kwargs"}  # fmt: skip


@pytest.mark.parametrize("name", [*LOADERS, *DIST])
def test_each_option_has_an_entry(name):
    kind, known = (LOADERS | DIST)[name]

    assert list_all(kind) == set(known) - (set(ELSEWHERE) - list_all(kind) if name in DIST else set())


@pytest.mark.parametrize(("name", "other"), [
    ("DistNeighborLoader", NeighborLoader), ("DistSubGraphLoader", SubGraphLoader),
    ("DistLinkNeighborLoader", LinkNeighborLoader),
])  # fmt: skip
def test_each_option_of_one_machine_has_an_entry_for_a_graph_in_parts(name, other):
    kind, known = DIST[name]

    assert list_all(other) - set(known) == set()
    # Equal defaults, such as `uneven="pad"`, but of ranks and of plans for rows in files, and of what must be given.
    own, others = ({key: part.default for key, part in inspect.signature(one).parameters.items()}
                   for one in (kind, other))  # fmt: skip
    shared = {key for key in own if key in others and own[key] is not inspect.Parameter.empty} - {"ranks", "ahead"}
    assert {key: own[key] for key in shared} == {key: others[key] for key in shared}


@pytest.mark.parametrize(("name", "option"), CASES, ids=lambda word: word)
def test_it_acts_or_is_refused_or_said_to_have_no_use(name, option):
    LOADERS[name][1][option].check(MAKE[name], option)


@pytest.mark.parametrize("name", DIST)
def test_so_it_is_with_a_graph_in_parts(name, parts):
    kind, known = DIST[name]
    failed = {}
    for option, case in known.items():
        try:
            case.check(make_dist(kind, parts), option)
        except (Exception, pytest.fail.Exception) as error:
            failed[option] = repr(error)[:500]

    assert failed == {}


BESIDE_A_SAMPLER = {"replace": True, "subgraph_type": "induced", "disjoint": True, "temporal_strategy": "last",
                    "weight_attr": "weight", "is_sorted": True, "directed": False}  # fmt: skip


@pytest.mark.parametrize("name", ["NeighborLoader", "LinkNeighborLoader"])
def test_a_sampler_that_is_given_has_its_own_options(name):
    for option, value in BESIDE_A_SAMPLER.items():
        Said(value, neighbor_sampler=sampler_of()).check(MAKE[name], option)
    for option, value in {"time_comparison": "<", "time_window": 3, "topology_placement": "cpu",
                          "topology_cache": "1K"}.items():  # fmt: skip
        Refused(value, f"{option}=.* needs neighbor_sampler=None", neighbor_sampler=sampler_of()).check(
            MAKE[name], option)  # fmt: skip


def test_options_that_need_another_are_refused_alone_or_said():
    nodes, links = MAKE["NeighborLoader"], MAKE["LinkNeighborLoader"]

    Said("last").check(nodes, "temporal_strategy")
    Said("last", disjoint=True).check(nodes, "temporal_strategy")
    Said("last").check(links, "temporal_strategy")
    for make in (nodes, links):
        Refused("<", "needs time_attr").check(make, "time_comparison")
        Refused(3, "needs time_attr").check(make, "time_window")
        Refused("drop", "needs ranks").check(make, "uneven")
    Refused(SEEDS, "input_time needs time_attr").check(nodes, "input_time")
    for make, times in ((nodes, TIMES[:30]), (links, TIMES[:20])):
        Refused(times, "input_end_time must be given with input_start_time").check(make, "input_start_time")
        Refused(times, "time_attr", input_start_time=times).check(make, "input_end_time")
    Refused(True, "needs neg_sampling").check(links, "strict_negatives")
    Refused(True, "layer_dependency").check(nodes, "layer_dependency")
    Refused(2, "needs hotness='frequency'", hotness="expected").check(nodes, "presample")
    Refused(False, "has no option filter_per_worker").check(MAKE["ShaDowKHopSampler"], "filter_per_worker")


@pytest.mark.parametrize("kind", [DistNeighborLoader, DistLinkNeighborLoader])
def test_a_graph_in_parts_is_not_replaced(parts, kind):
    loader = make_dist(kind, parts)()
    expected = look(loader)
    data, loader.data = loader.data, DATA

    with pytest.raises(PygDirectError, match=f"data of a {kind.__name__} cannot be replaced, got Data: partition"):
        list(loader)

    loader.data = data
    assert look(loader) != expected


def test_what_a_graph_in_parts_was_not_given_is_refused(parts):
    for kind in (DistNeighborLoader, DistLinkNeighborLoader):
        make = make_dist(kind, parts)
        Refused("<", "needs time_attr").check(make, "time_comparison")
        Refused(3, "needs time_attr").check(make, "time_window")
        Said("last").check(make, "temporal_strategy")
    Refused(True, "needs neg_sampling").check(make_dist(DistLinkNeighborLoader, parts), "strict_negatives")


def make_stores():
    store, graph = FeatureStore("cpu"), DATA.clone()
    store.put_tensor(DATA.x, group_name=None, attr_name="x", index=None)
    del graph.x
    return store, graph


@pytest.mark.parametrize("name", ["NeighborLoader", "LinkNeighborLoader", "NodeLoader", "LinkLoader"])
def test_rows_of_stores_have_the_options_of_the_stores(name):
    data = make_stores()
    more = {"input_nodes": SEEDS} if "Link" not in name else {"edge_label_index": (None, LINKS)}

    for option, value in {"store_dtype": torch.float16, "feature_cache": "20%"}.items():
        Refused(value, f"{option} must be None for a graph in stores", data=data, **more).check(MAKE[name], option)
    if name == "NeighborLoader":
        Refused("device_replicate", "cache_policy must be None", data=data).check(MAKE[name], "cache_policy")
