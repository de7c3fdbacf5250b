"""Every option of every other public class and function: samplers, rows, models of walks, trainers, streams, inference
and graphs in parts.

Options come from the signatures, so that a new one without an entry fails here.
"""

import inspect
import os
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed as dist
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

from pyg_direct import (
    ClusterData,
    CSRTopo,
    Feature,
    FeatureStore,
    GraphedStep,
    GraphSageSampler,
    MetaPath2Vec,
    MixedGraphSageSampler,
    NeighborLoader,
    Node2Vec,
    Producers,
    RandomNegativeSampler,
    SampleJob,
    infer,
    inference_loader,
)
from pyg_direct.distributed import DistGraph
from pyg_direct.distributed.row_exchange import Wanted
from pyg_direct.dynamic import FrameTrainer, stream
from pyg_direct.errors import PygDirectError
from pyg_direct.ops.argument_checks import list_options
from tests.batches import make_data
from tests.distributed.ranks import write_data
from tests.options import Refused, Seen, look
from tests.processes import run_ranks

SEEDS = torch.arange(0, 60, 2)
COMMON = {"batch_size": 7, "seed": 1, "device": "cpu"}
# What is not an option, but what an object is made of.
GIVEN = {"data", "graph", "edge_index", "edge_index_dict", "self"}
FOLDER = TemporaryDirectory()


def make_graph():
    data = make_data(time=torch.arange(70) % 50, weight=torch.arange(600) % 5 + 0.5,
                     train_mask=torch.arange(70) % 2 == 0)  # fmt: skip
    data.x = data.x + torch.rand(70, 5, generator=torch.Generator().manual_seed(0))
    return data


DATA = make_graph()


class Job(SampleJob):
    def __getitem__(self, index):
        return torch.arange(3 * index, 3 * index + 3)

    def __len__(self):
        return 4

    def shuffle(self):
        return None


TOPO, TABLE = CSRTopo(DATA.edge_index, num_nodes=70), torch.rand(70, 8)


def show(samples):
    return str([[n_id.tolist(), size, [adj.edge_index.tolist() for adj in adjs]] for n_id, size, adjs in samples])


def make_layers(**options):
    return GraphSageSampler(**{"csr_topo": TOPO, "sizes": [3, 2], "device": "cpu", "seed": 1, **options})


def make_mixed(**options):
    return MixedGraphSageSampler(**{"sample_job": Job(), "num_workers": 1, "csr_topo": TOPO, "sizes": [3, 2],
                                    "mode": "CPU_ONLY", "seed": 1, **options})  # fmt: skip


def make_negatives(**options):
    return RandomNegativeSampler(**{"graph": DATA.edge_index, "device": "cpu", "num_nodes": 70, "seed": 1, **options})


def draw_layers(sampler):
    return show([sampler.sample(SEEDS[:5])])


def draw_pairs(sampler):
    return sampler.sample(20).tolist()


def make_table(**options):
    return Feature(**{"device": "cpu", **options}).from_cpu_tensor(TABLE.clone())


def read_table(feature):
    return feature[SEEDS].tolist()


def make_store(**options):
    store = FeatureStore(**{"device": "cpu", **options})
    store.put_tensor(TABLE.clone(), group_name=None, attr_name="x", index=None)
    return store


def read_store(store):
    return store.get_tensor(group_name=None, attr_name="x", index=SEEDS).tolist()


def make_node2vec(**options):
    model = Node2Vec(**{"edge_index": DATA.edge_index, "embedding_dim": 4, "walk_length": 6, "context_size": 3,
                        "num_nodes": 70, "device": "cpu", "seed": 1, **options})  # fmt: skip
    return model.loader(batch_size=30)


def make_metapath2vec(**options):
    own = ("a", "to", "a")
    model = MetaPath2Vec(**{"edge_index_dict": {own: DATA.edge_index, ("a", "of", "a"): DATA.edge_index.flip(0)},
                            "embedding_dim": 4, "metapath": [own], "walk_length": 6, "context_size": 3,
                            "num_nodes_dict": {"a": 70}, "device": "cpu", "seed": 1, **options})  # fmt: skip
    return model.loader(batch_size=30)


def make_clusters(**options):
    return ClusterData(**{"data": DATA, "num_parts": 4, "log": False, **options})


def look_at_cluster(clusters):
    return repr([clusters[0].edge_index.tolist(), clusters[0].x.tolist()])


def has_partition(name):
    return lambda clusters: os.path.exists(os.path.join(FOLDER.name, "part_4", name))


WALKED = {"embedding_dim": Refused(0, "embedding_dim must be"), "walk_length": Seen(look, 5, 6),
          "context_size": Seen(look, 2, 3), "walks_per_node": Seen(look, 1, 2), "sparse": Refused(3, "sparse must be"),
          "num_negative_samples": Seen(look, 1, 2), "device": Refused("tpu", "device must name"),
          "seed": Seen(look, 1, 2)}  # fmt: skip
ROWS = {"device": Refused("tpu", "device must name"), "placement": Refused("cpu", "placement must be"),
        "device_cache_size": Refused("lots", "device_cache_size must look like"),
        "csr_topo": Refused(5, "csr_topo must be a CSRTopo")}  # fmt: skip
OTHERS = {
    "GraphSageSampler": (GraphSageSampler, make_layers, {
        "csr_topo": Refused(5, "csr_topo must be"), "sizes": Seen(draw_layers, [3, 2], [1, 1]),
        "device": Refused("cuda", "device must be 'cpu' or None with mode='CPU'", mode="CPU"),
        "mode": Refused("UVA", "needs a GPU"), "seed": Seen(draw_layers, 1, 2),
        "topology_cache": Refused("lots", "topology_cache must look like")}),
    "MixedGraphSageSampler": (MixedGraphSageSampler, make_mixed, {
        "sample_job": Refused(5, "sample_job must be"), "num_workers": Refused(0, "num_workers must be at least 1"),
        "csr_topo": Refused(5, "csr_topo must be"), "sizes": Seen(show, [3, 2], [1, 1]), "seed": Seen(show, 1, 2),
        "device": Refused("tpu", "device must name"), "mode": Refused("CPU", "mode must be one of")}),
    "RandomNegativeSampler": (RandomNegativeSampler, make_negatives, {
        "mode": Refused("CUDA", "device must be one that mode='CUDA'"), "device": Refused("tpu", "device must name"),
        "edge_dir": Seen(draw_pairs, "in", "out", graph=CSRTopo(indptr=TOPO.indptr, indices=TOPO.indices)),
        "num_nodes": Seen(draw_pairs, 70, 90), "seed": Seen(draw_pairs, 1, 2)}),
    "Feature": (Feature, make_table, {
        **ROWS, "rank": Refused(-1, "rank must be"), "device_list": Refused("all", "device_list must"),
        "cache_policy": Refused("some", "cache_policy must be one of"),
        "store_dtype": Seen(read_table, None, torch.float16), "link_blocks": Refused(0, "link_blocks must be"),
        "hotness": Refused("x", "hotness must be"), "host_cache_size": Refused("lots", "host_cache_size must look"),
        "device_group_list": Refused([[0], [0]], "device_group_list must"),
        "cold_policy": Refused("some", "cold_policy must be one of")}),
    "Node2Vec": (Node2Vec, make_node2vec, {
        **WALKED, "p": Seen(look, 1.0, 9.0), "q": Seen(look, 1.0, 9.0), "num_nodes": Seen(look, 70, 90)}),
    "MetaPath2Vec": (MetaPath2Vec, make_metapath2vec, {
        **WALKED, "metapath": Seen(look, [("a", "to", "a")], [("a", "of", "a")]),
        "num_nodes_dict": Seen(look, {"a": 70}, {"a": 90})}),
    "ClusterData": (ClusterData, make_clusters, {
        "num_parts": Seen(len, 3, 4), "recursive": Refused(3, "recursive must be"), "log": Refused(3, "log must be"),
        "save_dir": Seen(has_partition("metis.pt"), None, FOLDER.name),
        "filename": Seen(has_partition("own.pt"), None, "own.pt", save_dir=FOLDER.name),
        "keep_inter_cluster_edges": Seen(look_at_cluster, False, True),
        "sparse_format": Seen(look_at_cluster, "csr", "csc")}),
    "FeatureStore": (FeatureStore, make_store, {**ROWS, "store_dtype": Seen(read_store, None, torch.float16)}),
}  # fmt: skip


MODEL = GraphSAGE(5, 4, num_layers=1)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)
SNAPSHOTS = [Data(edge_index=DATA.edge_index, x=TABLE, y=TABLE[:, 0]) for _ in range(4)]


def make_step(**options):
    return GraphedStep(**{"model": MODEL, "compute": print, "optimizer": OPTIMIZER, **options})


def make_stream(**options):
    return stream(**{"signal": SNAPSHOTS, "device": "cpu", **options})


def make_trainer(**options):
    return FrameTrainer(**{"model": MODEL, "signal": SNAPSHOTS, "optimizer": OPTIMIZER, "device": "cpu", "window": 2,
                           **options})  # fmt: skip


MEMORY = {"device": Refused("tpu", "device must name"), "memory": Refused("lots", "memory must look like")}
TRAINERS = {
    "GraphedStep": (GraphedStep, make_step, {
        "compute": Refused(3, "compute must be callable"), "optimizer": Refused(3, "optimizer must have step"),
        "names": Refused("x", "names must be a list"), "warm_up": Refused(0, "warm_up must be at least 1"),
        "margin": Refused(-1, "margin must lie in"), "spared": Refused(-1, "spared must be at least 0")}),
    "FrameTrainer": (FrameTrainer, make_trainer, {
        **MEMORY, "optimizer": Refused(3, "optimizer"), "window": Refused(0, "window must lie in"),
        "loss": Refused(3, "loss must be callable"), "target": Refused("x", "target must be one of"),
        "step": Refused(3, "step must be callable"), "replay": Refused(True, "replay must not be asked for on cpu")}),
    "stream": (stream, make_stream, {
        **MEMORY, "keep": Refused("x", "keep must be one of"), "group_size": Refused(3, "group_size must be one of"),
        "form": Refused("x", "form must be one of")}),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAINERS)
def test_trainers_and_streams_check_theirs(name):
    kind, make, known = TRAINERS[name]

    assert set(inspect.signature(kind).parameters) - {"model", "signal"} == set(known)
    for option, case in known.items():
        case.check(make, option)


@pytest.mark.parametrize("name", OTHERS)
def test_samplers_and_rows_drop_no_option(name, monkeypatch):
    kind, make, known = OTHERS[name]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert set(list_options(kind)) - GIVEN == set(known)
    for option, case in known.items():
        case.check(make, option)


def test_inference_takes_only_what_it_uses():
    model = GraphSAGE(5, 4, num_layers=1).eval()
    loader = inference_loader(DATA, **{**COMMON, "batch_size": 16})

    assert next(iter(loader)).batch_size == 16
    for option, value in {"store_dtype": torch.float16, "feature_cache": "20%", "num_neighbors": [3],
                          "cache_policy": "device_replicate", "input_nodes": SEEDS}.items():  # fmt: skip
        Refused(value, option).check(lambda **options: inference_loader(DATA, device="cpu", **options), option)
        Refused(value, option).check(lambda **options: infer(model, DATA, device="cpu", **options), option)
    Refused(3, "prefetch belong to the loader").check(lambda **options: infer(model, loader, **options), "prefetch")
    changed = infer(model, loader, x=DATA.x + 1)
    assert not torch.equal(changed, infer(model, loader))
    Refused("gpu", "placement must be").check(lambda **options: infer(model, loader, **options), "placement")


def test_producers_check_theirs():
    def make(**options):
        return Producers(NeighborLoader(DATA, [3, 2], SEEDS, **COMMON), **options)

    known = {"devices": Refused("cpu", "devices must be a list"), "device": Refused("tpu", "device must name"),
             "ahead": Refused(0, "ahead must be"), "threads": Refused(0, "threads must be")}  # fmt: skip
    assert set(list_options(Producers)) == {"loader", *known}
    for option, case in known.items():
        case.check(make, option)


def open_parts(rank, folder):
    """What each option of a graph in parts does; None where it is refused."""

    def see(**options):
        try:
            with DistGraph(**{"folder": folder, "device": "cpu", "share_graph": False, **options}) as graph:
                return graph.obstacle, graph.rows.kept_bytes, graph.rows.num_kept, graph.communicator._silence
        except (PygDirectError, OSError) as error:
            return str(error)

    plain, x = see(), folder / "part-00000" / "node-0.rows-0.npy"
    seen = {
        "device": see(device="tpu"),
        "group": see(group=[dist.new_group([member]) for member in range(2)][rank]),
        "backend": see(backend="nccl"),
        "captured": see(captured=True),
        "device_cache_size": see(device_cache_size="lots"),
        "placement": see(placement="cpu"),
        "replicas": see(replicas="20%"),
        "share_graph": see(share_graph=True),
    }
    if rank == 1:
        # It comes when it is given up.
        dist.barrier()
    seen["timeout"] = see(timeout=1)
    if rank == 0:
        dist.barrier()
    both = [see(share_graph=True, **more) for more in ({"replicas": "20%"}, {"share_rows": True})]
    with DistGraph(folder, device="cpu", share_graph=False, share_rows=True) as graph:
        ids = torch.arange(70)
        graph.communicator.run(graph.rows.fetch, [Wanted(graph.node_types[0], ids, ["x"])])
        seen["share_rows"] = graph.rows.num_kept
    seen["silence"] = see(silence=9)
    dist.barrier()
    if rank == 0 and x.exists():
        x.write_bytes(x.read_bytes()[:-1] + b"?")
    dist.barrier()
    seen["check"] = see(check="full")
    return plain, seen, both


def test_a_graph_in_parts_drops_no_option(tmp_path):
    write_data(tmp_path / "p", DATA, 2, times=True, weights=True)

    (plain, seen, both), (_, other, _) = run_ranks(open_parts, 2, tmp_path / "p")

    assert set(inspect.signature(DistGraph).parameters) - {"folder"} == set(seen) == set(other)
    assert {name for name, found in seen.items() if found == plain} == set()
    assert "rank 1 did not come within 1 seconds" in seen["timeout"]
    assert all(name in words for name, words in zip(("replicas", "share_rows"), both, strict=True))
    assert all("needs share_graph=False or 'auto'" in words for words in both)
