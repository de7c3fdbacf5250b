"""Standard benchmark cases: each yields rows of this machine, at a factor of the products-shaped graph's size."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch_geometric.data import Data

from benchmarks.distributed.clients import measure_clients
from benchmarks.distributed.clique import measure_clique
from benchmarks.distributed.dist_accuracy import measure_dist_accuracy
from benchmarks.distributed.exchange import measure_distributed, measure_hosts
from benchmarks.distributed.multi_gpu import measure_multi_gpu
from benchmarks.distributed.partitioning import measure_cuts, measure_partitioning
from benchmarks.distributed.train_parts import measure_training_in_parts
from benchmarks.dynamic.dynamic_cases import DYNAMIC_CASES
from benchmarks.features.disk import measure_disk_feature, measure_disk_rows, measure_disk_training
from benchmarks.features.hot_rows import make_skewed_graph, measure_drift, measure_hit_rates, measure_ranking
from benchmarks.features.igbh_files import measure_igbh_files
from benchmarks.features.larger_than_memory import measure_larger_than_memory
from benchmarks.features.learned_rows import measure_learned_rows
from benchmarks.features.link_share import measure_link_share
from benchmarks.features.sharded import measure_sharded
from benchmarks.features.shared_start import measure_shared_start
from benchmarks.features.stored_rows import measure_cold_growth, measure_stored_rows
from benchmarks.features.unified import measure_figure_6, measure_figure_7, measure_indexing
from benchmarks.launch import launch_by_torch
from benchmarks.loader.accuracy import measure_accuracy
from benchmarks.loader.continuous_time import measure_continuous_time
from benchmarks.loader.host_memory import measure_host_memory
from benchmarks.loader.labor import SAMPLINGS, measure_fetched_bytes, measure_hubs, measure_sampling, measure_steps
from benchmarks.loader.peers import measure_samplers_on_cpu, measure_samplers_on_gpu, measure_tables
from benchmarks.loader.power import measure_training
from benchmarks.loader.python_time import measure_option_times, measure_python_time
from benchmarks.loader.sampling_growth import measure_growth, measure_papers
from benchmarks.loader.sets_and_walks import measure_sets, measure_walks
from benchmarks.loader.small_graphs import measure_graph_training, measure_small_graphs
from benchmarks.loader.startup import measure_startup
from benchmarks.loader.typed_batches import (
    measure_hgt,
    measure_links,
    measure_relations,
    measure_times,
    measure_typed_links,
    measure_types,
    measure_types_on_cpu,
)
from benchmarks.loader.typed_graphs import make_mag
from benchmarks.nn.aggregation import measure_aggregation, read_batch
from benchmarks.nn.convolutions import measure_convolutions
from benchmarks.nn.databases import measure_databases
from benchmarks.nn.first_layer import measure_first_layer
from benchmarks.nn.inference import inference
from benchmarks.nn.models import measure_accelerated_steps, measure_epochs
from benchmarks.nn.relational import measure_relations as measure_relational_layers
from benchmarks.nn.rgat import measure_rgat, measure_rgat_accuracy, measure_rgat_on_host
from benchmarks.nn.typed_steps import measure_typed_steps
from benchmarks.nn.unedited import measure_unedited
from benchmarks.nn.whole_graphs import measure_whole_graphs
from pyg_direct.bench.beside import measure_loaders
from pyg_direct.bench.gather import measure_cached_rows, measure_cold_rows, measure_hot_rows
from pyg_direct.bench.launch import measure_launch
from pyg_direct.bench.loader import measure_loader
from pyg_direct.bench.result_row import Row
from pyg_direct.bench.sampling import measure_cpu_sampling, measure_gpu_sampling
from pyg_direct.datasets import NodeDataset, load_folder, synthetic_graph
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.loader.neighbor_loader import NeighborLoader
from pyg_direct.runtime.cuda.device import resolve_device
from pyg_direct.sampling.graphsage_sampler import GraphSageSampler

# Workers of PyG's loader beside a GPU and 16 cores: more are not always faster.
PEER_WORKERS = (0, 1, 2, 4, 8, 16)

Case = Callable[[float], Iterator[Row]]


def _name(scale: float) -> str:
    return "products" if scale == 1 else f"products x {scale:g}"


def memory(scale: float) -> Iterator[Row]:
    """Measure the peak of host memory while features and topology are placed."""
    yield from measure_host_memory(int(8_000_000 * scale), 256, int(64_000_000 * scale))


def sampling(scale: float) -> Iterator[Row]:
    """Measure edges a second, on the GPU if there is one."""
    device = resolve_device(None).type
    graph = synthetic_graph("products", scale=scale, topology_only=True, device=device)
    measure = measure_gpu_sampling if device == "cuda" else measure_cpu_sampling
    yield from measure(graph.edge_index, graph.num_nodes, _name(scale))


def launch(scale: float) -> Iterator[Row]:
    """Measure the host time of a launch from Python; takes a few seconds."""
    resolve_device("cuda")
    yield from measure_launch(launch_by_torch)


def gather(scale: float) -> Iterator[Row]:
    """Measure bytes a second of rows in GPU memory and in host memory."""
    resolve_device("cuda")
    yield from measure_hot_rows()
    yield from measure_cached_rows()
    yield from measure_stored_rows()
    yield from measure_cold_rows()


def learned_rows(scale: float) -> Iterator[Row]:
    """Measure steps of rows that are learned, in GPU memory and on the host, beside torch's."""
    batch_size = 200_000 if torch.cuda.is_available() else 20_000
    yield from measure_learned_rows(max(1000, int(4_000_000 * scale)), batch_size=int(batch_size * min(1.0, scale)))


def loader(scale: float) -> Iterator[Row]:
    """Measure a training step with its loader beside the step alone."""
    on_gpu = torch.cuda.is_available()
    graph = synthetic_graph("products", scale=scale, device="cuda" if on_gpu else "cpu").to("cpu")
    # Attributes, topology and cache.
    cases = [("cuda", None, None), ("unified", "cuda", None), ("unified", None, None), ("unified", None, "20%"),
             ("auto", None, None)] if on_gpu else [("cpu", None, None)]  # fmt: skip
    for placement, topology, cache in cases:
        data = graph.to_data()
        yield from measure_loader(data, graph.train_idx, graph.num_classes, _name(scale), placement, cache,
                                  batches=60 if on_gpu else 6, topology_placement=topology)  # fmt: skip
    if on_gpu:
        yield from measure_python_time(graph.to_data(), graph.train_idx, _name(scale))


def aggregate(scale: float) -> Iterator[Row]:
    """Measure aggregation over the edges of a sampled batch."""
    graph = _make_graph(scale)
    batch = _sample_batch(graph)
    yield from measure_aggregation(batch, _name(scale))
    assert graph.x is not None
    num_targets = sum(batch.num_sampled_nodes[:-1])
    yield from measure_first_layer(graph.x, batch.n_id, read_batch(batch), num_targets, _name(scale))


def convolutions(scale: float) -> Iterator[Row]:
    """Measure convolutions one by one beside PyG's implementations and `torch.compile`."""
    yield from measure_convolutions(_sample_batch(_make_graph(scale)), _name(scale))


def link_share(scale: float) -> Iterator[Row]:
    """Measure the slowdown of a replayed step by simultaneous reads of rows on the host, by the number of reading
    blocks.
    """
    resolve_device("cuda")
    graph = _make_graph(scale)
    yield from measure_link_share(graph.to_data(), graph.train_idx, graph.num_classes, _name(scale))


def whole_graphs(scale: float) -> Iterator[Row]:
    """Measure models trained on whole graphs, without batches: one of Cora's shape, and a twentieth of products."""
    device = resolve_device(None)
    nodes = max(10, int(2708 * min(1.0, scale)))
    edge_index = torch.randint(nodes, (2, 4 * nodes), device=device)
    yield from measure_whole_graphs(edge_index, nodes, 1433, f"Cora x {scale:g}" if scale < 1 else "Cora")
    graph = synthetic_graph("products", scale=scale / 20, device=device.type).to_data()
    edge_index = graph.edge_index[:, torch.randperm(graph.edge_index.shape[1])].to(device)
    yield from measure_whole_graphs(edge_index, int(graph.num_nodes), 100, f"{_name(scale)} / 20")


def unedited(scale: float) -> Iterator[Row]:
    """Measure programs like PyG's examples on whole graphs, plain and by `pyg_direct run`; `scale` is unused."""
    del scale
    yield from measure_unedited()


def databases(scale: float) -> Iterator[Row]:
    """Measure programs like RelBench's on tables, plain and by `pyg_direct run`: a twentieth of rel-amazon's rows."""
    yield from measure_databases(scale / 20)


def models(scale: float) -> Iterator[Row]:
    """Measure training of PyG's models, plain and accelerated."""
    graph, name = _make_graph(scale), _name(scale)
    batch = _sample_batch(graph)
    yield from measure_accelerated_steps(batch, graph.num_classes, name)
    mag = make_mag(0.2 * scale, resolve_device(None), num_features=batch.x.shape[1])
    yield from measure_relational_layers(batch, mag, "paper", name)
    yield from measure_typed_steps(mag, "paper", name, batches=48 if batch.x.is_cuda else 6)
    del mag
    yield from measure_epochs(graph.to_data(), graph.train_idx, graph.num_classes, name,
                              batches=48 if batch.x.is_cuda else 6)  # fmt: skip


def rgat(scale: float) -> Iterator[Row]:
    """Measure R-GAT of MLPerf Training over a graph of a 64th of IGBH-Full."""
    yield from measure_rgat(scale / 64, f"igbh / {64 / scale:g}")


def rgat_host(scale: float) -> Iterator[Row]:
    """Measure R-GAT over a 32nd of IGBH-Full, with fp8 rows in GPU memory and in host memory."""
    resolve_device("cuda")
    yield from measure_rgat_on_host(scale / 32, f"igbh / {32 / scale:g}")


def rgat_accuracy(scale: float) -> Iterator[Row]:
    """Measure the accuracy of R-GAT after few steps, accelerated and with PyG's kernels, by three runs of each."""
    is_on_gpu = torch.cuda.is_available()
    own = (1 / 256 if is_on_gpu else 1e-4) * scale
    yield from measure_rgat_accuracy(own, f"igbh / {1 / own:g}", batches=150 if is_on_gpu else 120,
                                     size=512 if is_on_gpu else 128)  # fmt: skip


def igbh_files(scale: float) -> Iterator[Row]:
    """Measure R-GAT over a graph of a 64th of IGBH-Full with rows in files: 17 GB of disk, and of host memory."""
    is_on_gpu = torch.cuda.is_available()
    own = (1 / 64 if is_on_gpu else 1e-4) * scale
    size, batches = (512, 480) if is_on_gpu else (32, 60)
    yield from measure_igbh_files(own, f"igbh / {1 / own:g}", batch_size=size, batches=batches)


def _make_graph(scale: float) -> NodeDataset:
    return synthetic_graph("products", scale=scale, device=resolve_device(None).type).to("cpu")


def _sample_batch(graph: NodeDataset) -> Data:
    loader = NeighborLoader(graph.to_data(), [15, 10, 5], input_nodes=graph.train_idx, batch_size=1024, seed=0)
    batch: Data = next(iter(loader))
    return batch


def hetero(scale: float) -> Iterator[Row]:
    """Measure types, times, weights, separate trees, links and a hundred relations."""
    on_gpu = torch.cuda.is_available()
    yield from measure_types(scale) if on_gpu else measure_types_on_cpu(scale)
    yield from measure_relations(scale)
    yield from measure_typed_links(scale)
    yield from measure_hgt(scale)
    yield from measure_times(scale, PEER_WORKERS if on_gpu else (0, 2))
    graph = synthetic_graph("products", scale=scale / 4, topology_only=True, device=resolve_device(None)).to("cpu")
    yield from measure_links(graph.to_data(), _name(scale / 4))


def loader_python(scale: float) -> Iterator[Row]:
    """Measure the host's time for a batch by each option of the loaders, on an eighth of a graph like ogbn-mag."""
    yield from measure_option_times(make_mag(scale / 8, torch.device("cpu"), num_features=64))


def sets_and_walks(scale: float) -> Iterator[Row]:
    """Measure batches of clusters, of parts of all nodes and of GraphSAINT, and random walks, on a tenth of the
    graph.
    """
    graph = synthetic_graph("products", scale=scale / 10, device=resolve_device(None).type).to("cpu")
    yield from measure_sets(graph.to_data(), _name(scale / 10))
    yield from measure_walks(graph.edge_index, graph.num_nodes, _name(scale / 10))


def unified(scale: float) -> Iterator[Row]:
    """Measure the microbenchmarks of PyTorch-Direct."""
    resolve_device("cuda")
    yield from measure_figure_6()
    yield from measure_figure_7()
    yield from measure_indexing()


def power(scale: float) -> Iterator[Row]:
    """Measure training with features in host memory: steps, CPU cores and GPU power."""
    resolve_device("cuda")
    graph = synthetic_graph("products", scale=scale, device="cuda").to("cpu")
    assert graph.x is not None
    topology = CSRTopo(graph.edge_index, num_nodes=graph.num_nodes)
    yield from measure_training(graph.x, graph.y, topology, graph.train_idx, _name(scale))


def disk(scale: float) -> Iterator[Row]:
    """Measure rows in files."""
    is_on_gpu = torch.cuda.is_available()
    yield from measure_disk_rows(int((1_500_000 if is_on_gpu else 300_000) * scale))
    own = (0.2 if is_on_gpu else 0.03) * scale
    graph = synthetic_graph("products", scale=own, device=resolve_device(None)).to("cpu")
    assert graph.x is not None
    sampler = GraphSageSampler(CSRTopo(graph.edge_index, num_nodes=graph.num_nodes), [15, 10, 5], seed=0)
    batches = [sampler.sample(seeds)[0] for seeds in graph.train_idx[: 10 * 1024].split(1024)]
    yield from measure_disk_feature(graph.x, batches, _name(own))
    data = graph.to_data()
    yield from measure_disk_training(data, graph.train_idx, graph.num_classes, _name(own),
                                     batches=48 if is_on_gpu else 12)  # fmt: skip


def file_reads(scale: float) -> Iterator[Row]:
    """Measure bytes that windows of batches read of files larger than the memory left to them."""
    yield from _measure_files(scale, "reads")


def file_lists(scale: float) -> Iterator[Row]:
    """Measure samples of neighbor lists in a file, and the host memory that rows of a file take."""
    yield from _measure_files(scale, "lists")


def file_epochs(scale: float) -> Iterator[Row]:
    """Measure epochs over rows in files that are 8 times as large as the memory left to them."""
    yield from _measure_files(scale, "epochs")


def file_inference(scale: float) -> Iterator[Row]:
    """Measure layer-wise inference over rows in files that are 4 times as large as the memory left to them."""
    yield from _measure_files(scale, "inference")


def _measure_files(scale: float, part: str) -> Iterator[Row]:
    is_on_gpu = torch.cuda.is_available()
    own = (0.5 if is_on_gpu else 0.02) * scale
    graph = synthetic_graph("products", scale=own, device=resolve_device(None)).to("cpu")
    data = graph.to_data()
    # Rows of 512 bytes.
    data.x = torch.randn(graph.num_nodes, 128, generator=torch.Generator().manual_seed(0))
    yield from measure_larger_than_memory(data, graph.train_idx, graph.num_classes, _name(own),
                                          1024 if is_on_gpu else 64, int(4_800_000 * scale), parts=[part])  # fmt: skip


def hotness(scale: float) -> Iterator[Row]:
    """Measure the choice of hot rows on a graph like ogbn-products, on a very skewed one, and with drifting reads.

    Also the share of an epoch that the choice takes.
    """
    graph = _make_graph(scale)
    yield from measure_ranking(graph.to_data(), graph.train_idx, graph.num_classes, _name(scale),
                               60 if torch.cuda.is_available() else 6)  # fmt: skip
    yield from measure_hit_rates(graph.edge_index, graph.num_nodes, graph.train_idx, _name(scale), (15, 10, 5))
    num_nodes = int(3_000_000 * scale)
    train_idx = torch.randperm(num_nodes, generator=torch.Generator().manual_seed(0))[: num_nodes // 10]
    yield from measure_hit_rates(make_skewed_graph(num_nodes, 10 * num_nodes), num_nodes, train_idx, "skewed", (25, 10))
    yield from measure_drift(int(100_000 * scale))


def small_graphs(scale: float) -> Iterator[Row]:
    """Measure batches of many small graphs, ours and PyG's."""
    yield from measure_small_graphs(scale, workers=PEER_WORKERS if torch.cuda.is_available() else (0,))


def small_graph_training(scale: float) -> Iterator[Row]:
    """Measure training steps of GIN and GINE on many small graphs, accelerated by default and by PyG."""
    yield from measure_graph_training(scale, workers=(0, 8) if torch.cuda.is_available() else (0,))


def continuous_time(scale: float) -> Iterator[Row]:
    """Measure training steps of a temporal graph network, with our classes and with PyG's."""
    yield from measure_continuous_time(scale)


def startup(scale: float) -> Iterator[Row]:
    """Measure seconds to the first batch in fresh processes."""
    yield from measure_startup(0.1 * scale)


def sampling_growth(scale: float) -> Iterator[Row]:
    """Measure sampling on graphs of papers100M's size, and with growing edges, batches, degrees and ids."""
    resolve_device("cuda")
    yield from measure_papers()
    yield from measure_growth()


def gather_growth(scale: float) -> Iterator[Row]:
    """Measure rows in host memory with tables up to 64 GiB and rows up to 8 KiB."""
    resolve_device("cuda")
    yield from measure_cold_growth(int((64 << 30) * scale))


def labor(scale: float) -> Iterator[Row]:
    """Measure fetched bytes, and steps, with LABOR and super-batches."""
    device = resolve_device(None).type
    graph = synthetic_graph("products", scale=scale, device=device)
    train_idx = graph.train_idx.cpu()
    yield from measure_fetched_bytes(graph.edge_index, graph.num_nodes, graph.num_features, train_idx, _name(scale))
    if device == "cuda":
        yield from measure_sampling(graph.edge_index, graph.num_nodes, train_idx, _name(scale))
        yield from measure_hubs()
        yield from measure_steps(graph.to("cpu").to_data(), train_idx, graph.num_classes, _name(scale))


def accuracy(scale: float) -> Iterator[Row]:
    """Measure test accuracy with fewer bytes; also on the graph of a folder named by PYG_DIRECT_DATA."""
    kinds: dict[str, dict[str, Any]] = {"uniform, fp32": {}, "uniform, fp32, accelerated": {"accelerate": True}}
    for name in ("labor", "labor, dependent layers"):
        kinds[f"{name}, bf16"] = {"dtype": torch.bfloat16, **SAMPLINGS[name]}
    folder = os.environ.get("PYG_DIRECT_DATA")
    graph = partial(synthetic_graph, "products", scale=scale)
    if resolve_device(None).type == "cpu":
        # A smaller graph has few batches; the folder's graph is limited to an hour's work.
        if folder:
            yield from measure_accuracy(load_folder(folder), {"uniform, fp32": {}}, seeds=1, epochs=4)
        yield from measure_accuracy(graph(), kinds, epochs=8, learning_rate=0.005, batch_size=256)
        return
    if folder:
        yield from measure_accuracy(load_folder(folder), kinds)
    yield from measure_accuracy(graph(), kinds, epochs=4)


def peers(scale: float) -> Iterator[Row]:
    """Measure installed samplers, tables and loaders of other packages on the same graph."""
    on_gpu = torch.cuda.is_available()
    graph = synthetic_graph("products", scale=scale, topology_only=True, device="cuda" if on_gpu else "cpu")
    topology = CSRTopo(graph.edge_index, num_nodes=graph.num_nodes)
    del graph
    name = _name(scale)
    if on_gpu:
        yield from measure_samplers_on_gpu(topology, name)
        yield from measure_tables()
    yield from measure_samplers_on_cpu(topology, name)
    yield from measure_loaders(topology, name, workers=(8, 16) if on_gpu else (0, 2), batches=16 if on_gpu else 8)


def multi_gpu_rows(scale: float) -> Iterator[Row]:
    """Measure, of `multi_gpu`, rows of features over all GPUs, with several numbers of simultaneous reads."""
    resolve_device("cuda")
    yield from measure_multi_gpu(scale, ("rows",))


def multi_gpu_papers(scale: float) -> Iterator[Row]:
    """Measure, of `multi_gpu`, epochs with features on the host."""
    resolve_device("cuda")
    yield from measure_multi_gpu(scale, ("papers",))


def multi_gpu(scale: float) -> Iterator[Row]:
    """Measure rows and epochs on all GPUs of this host, and on fewer."""
    resolve_device("cuda")
    yield from measure_multi_gpu(scale)


def shared_start(scale: float) -> Iterator[Row]:
    """Measure the start of several processes over rows of papers100M's shape, a quarter of them at scale 1."""
    num_gpus = torch.cuda.device_count()
    yield from measure_shared_start(scale / 4, (num_gpus,) if num_gpus > 1 else (4,))


def clique(scale: float) -> Iterator[Row]:
    """Measure 1, 2, 4 and 8 worker processes of this host that keep the graph in one memory, GPUs in peer memory."""
    num_gpus = torch.cuda.device_count()
    graph = synthetic_graph("products", scale=0.2 * scale, device="cuda" if num_gpus else "cpu").to("cpu")
    counts = [n for n in (1, 2, 4, 8) if n <= (num_gpus or 2)]
    yield from measure_clique(graph, _name(0.2 * scale), "cuda" if num_gpus else "cpu", counts)


def distributed(scale: float) -> Iterator[Row]:
    """Measure loading of a graph in parts in 1, 2 and 4 processes of this host.

    Also a model of more hosts, rows shared out over processes, and clients of servers. If PYG_DIRECT_DATA names a
    folder, its graph is trained in both modes.
    """
    num_gpus = torch.cuda.device_count()
    graph = synthetic_graph("products", scale=scale, device="cuda" if num_gpus else "cpu").to("cpu")
    if num_gpus > 1:
        yield from measure_distributed(graph, _name(scale), "cuda", [n for n in (1, 2, 4) if n <= num_gpus])
        yield from measure_hosts(graph, _name(scale), [n for n in (2, 4) if n <= num_gpus])
        yield from measure_training_in_parts(graph, _name(scale), "cuda", [n for n in (2, 4) if n <= num_gpus])
    # Four processes even with fewer cores; the model takes this into account.
    yield from measure_distributed(graph, _name(scale), "cpu", [1, 2, 4])
    yield from measure_sharded(graph, _name(scale), "cpu", 4 if (os.cpu_count() or 1) >= 4 else 2)
    yield from measure_clients(graph, _name(scale))
    folder = os.environ.get("PYG_DIRECT_DATA")
    if folder:
        yield from measure_dist_accuracy(load_folder(folder))


def partition(scale: float) -> Iterator[Row]:
    """Measure partitioning of a file of 100 M edges by hash; and of PYG_DIRECT_DATA's graph by METIS and as a
    stream.
    """
    yield from measure_partitioning(scale)
    folder = os.environ.get("PYG_DIRECT_DATA")
    if folder:
        yield from measure_cuts(load_folder(folder))


SHORT_CASES: dict[str, Case] = {
    "memory": memory,
    "sampling": sampling,
    "launch": launch,
    "gather": gather,
    "learned_rows": learned_rows,
    "loader": loader,
    "aggregate": aggregate,
    "models": models,
    "hetero": hetero,
    "loader_python": loader_python,
    "small_graphs": small_graphs,
    "small_graph_training": small_graph_training,
    "sets_and_walks": sets_and_walks,
    "continuous_time": continuous_time,
    "startup": startup,
    "unified": unified,
    "power": power,
    "disk": disk,
    "hotness": hotness,
}
# Minutes, up to 100 GB of GPU or host memory, or other packages.
LONG_CASES: dict[str, Case] = {
    "sampling_growth": sampling_growth,
    "gather_growth": gather_growth,
    "labor": labor,
    "accuracy": accuracy,
    "convolutions": convolutions,
    "rgat": rgat,
    "rgat_host": rgat_host,
    "rgat_accuracy": rgat_accuracy,
    "igbh_files": igbh_files,
    "file_reads": file_reads,
    "file_lists": file_lists,
    "file_epochs": file_epochs,
    "file_inference": file_inference,
    "link_share": link_share,
    "whole_graphs": whole_graphs,
    "unedited": unedited,
    "databases": databases,
    "inference": inference,
    "peers": peers,
    "multi_gpu": multi_gpu,
    "multi_gpu_rows": multi_gpu_rows,
    "multi_gpu_papers": multi_gpu_papers,
    "shared_start": shared_start,
    "clique": clique,
    "distributed": distributed,
    "partition": partition,
    **DYNAMIC_CASES,
}
