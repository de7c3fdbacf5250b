"""Small programs that call the CPU loops of common programs: `list_cpu_loops.py` lists the loops of each part.

`python .ci/small_programs.py` runs all of them; with a wheel that holds the listed loops, nothing is compiled.
"""

import math
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData, InMemoryDataset
from torch_geometric.nn import GAT, GCN, GIN, GATConv, GraphSAGE, HeteroConv, SAGEConv

import pyg_direct
from pyg_direct.compiler.jit import run_alone
from pyg_direct.compiler.link_once import replaced
from pyg_direct.datasets.dynamic_graphs import synthetic_dtdg
from pyg_direct.ops import compute_content_hash, run_kernel
from pyg_direct.ops.rows.gather_rows import FEW_BYTES, gather_rows
from pyg_direct.ops.rows.graph_rows import LoopChoice

_NODES, _EDGES, _WIDTH = 60, 400, 64
_FANOUTS = [3, 2]
_SEEDS = torch.arange(16)
_CITES, _WRITES = ("paper", "cites", "paper"), ("author", "writes", "paper")


def _draw_edges(sources: int = _NODES, targets: int = _NODES) -> Tensor:
    return torch.stack([torch.randint(sources, (_EDGES,)), torch.randint(targets, (_EDGES,))])


def _make_data() -> Data:
    """A graph with rows, labels, times and weights of everything."""
    return Data(x=torch.rand(_NODES, _WIDTH), y=torch.randint(4, (_NODES,)), edge_index=_draw_edges(),
                edge_attr=torch.rand(_EDGES, 4), edge_weight=torch.rand(_EDGES) + 0.1,
                edge_time=torch.randint(9, (_EDGES,)), time=torch.randint(9, (_NODES,)))  # fmt: skip


def _make_typed() -> HeteroData:
    data = HeteroData()
    for kind, count in (("paper", _NODES), ("author", _NODES // 2)):
        data[kind].x, data[kind].y = torch.rand(count, _WIDTH), torch.randint(4, (count,))
        data[kind].time = torch.randint(9, (count,))
    for source, name, target in (_CITES, _WRITES, ("paper", "rev_writes", "author")):
        edges = data[source, name, target]
        edges.edge_index = _draw_edges(data[source].num_nodes, data[target].num_nodes)
        edges.edge_weight, edges.edge_time = torch.rand(_EDGES) + 0.1, torch.randint(9, (_EDGES,))
    return data


def _read(*loaders: Iterable[object]) -> None:
    for loader in loaders:
        for _ in loader:
            pass


def _train(model: torch.nn.Module, *graphs: Data | HeteroData) -> None:
    pyg_direct.accelerate(model)
    for graph in graphs:
        if isinstance(graph, HeteroData):
            sum(rows.sum() for rows in model(graph.x_dict, graph.edge_index_dict).values()).backward()
        else:
            model(graph.x, graph.edge_index).sum().backward()


def sample_uniformly() -> None:
    """Neighbors of nodes, each option of subgraphs, and layers as GraphSAGE's old sampler gives them."""
    data = _make_data()
    del data.time, data.edge_time
    for options in ({}, {"replace": True}, {"disjoint": True}, {"subgraph_type": "induced"},
                    {"subgraph_type": "bidirectional"}, {"shuffle": True}):  # fmt: skip
        _read(pyg_direct.NeighborLoader(data, _FANOUTS, _SEEDS, batch_size=8, device="cpu", **options))
    _read(pyg_direct.NeighborLoader(data, [-1, 2], _SEEDS, batch_size=8, device="cpu"))
    topology = pyg_direct.CSRTopo(data.edge_index, num_nodes=_NODES)
    pyg_direct.GraphSageSampler(topology, _FANOUTS, "cpu", "CPU").sample(_SEEDS)
    pyg_direct.Feature(device="cpu").from_cpu_tensor(data.x)[_SEEDS]


def read_rows() -> None:
    """Rows in units of 8, 4, 2 and 1 bytes, as many as loops are taken for."""
    for row in (
        torch.empty(16),
        torch.empty(3),
        torch.empty(3, dtype=torch.float16),
        torch.empty(3, dtype=torch.uint8),
    ):
        table = row.new_zeros(_NODES, len(row))
        count = 2 * FEW_BYTES // (len(row) * row.element_size())
        for dtype in (torch.int64, torch.int32):
            gather_rows(table, torch.zeros(count, dtype=dtype))


def sample_by_time() -> None:
    """Neighbors up to the time of a seed, by times of edges and of nodes."""
    data = _make_data()
    for strategy in ("uniform", "last"):
        for name, times in (("edge_time", torch.full((len(_SEEDS),), 6)), ("time", None)):
            _read(pyg_direct.NeighborLoader(data, _FANOUTS, _SEEDS, batch_size=8, device="cpu", time_attr=name,
                                            input_time=times, temporal_strategy=strategy))  # fmt: skip


def sample_by_weight() -> None:
    """Neighbors drawn by weight, with and without replacement."""
    for replace in (False, True):
        _read(pyg_direct.NeighborLoader(_make_data(), _FANOUTS, _SEEDS, batch_size=8, device="cpu",
                                        weight_attr="edge_weight", replace=replace))  # fmt: skip


def sample_links() -> None:
    """Links with negatives, with and without times."""
    data = _make_data()
    links, labels = data.edge_index[:, :16], torch.ones(16)
    for negatives in (None, {"mode": "binary", "amount": 1}, {"mode": "triplet", "amount": 2}):
        given = labels if negatives is None else None
        _read(pyg_direct.LinkNeighborLoader(data, _FANOUTS, links, given, neg_sampling=negatives, batch_size=8,
                                            device="cpu"))  # fmt: skip
    _read(pyg_direct.LinkNeighborLoader(data, _FANOUTS, links, time_attr="edge_time", batch_size=8, device="cpu",
                                        edge_label_time=torch.full((16,), 6), neg_sampling="binary"))  # fmt: skip


def sample_types() -> None:
    """Typed neighbors: uniformly, by weight, by time, disjoint, and HGT's."""
    data = _make_typed()
    seeds = "paper", _SEEDS
    for options in ({}, {"replace": True}, {"disjoint": True}, {"weight_attr": "edge_weight"},
                    {"time_attr": "edge_time", "input_time": torch.full((16,), 6)}, {"time_attr": "time"},
                    {"time_attr": "time", "temporal_strategy": "last"}):  # fmt: skip
        _read(pyg_direct.NeighborLoader(data, _FANOUTS, seeds, batch_size=8, device="cpu", **options))
    _read(pyg_direct.HGTLoader(data, [8, 8], seeds, batch_size=8, device="cpu"))


def sample_typed_links() -> None:
    """Typed links with negatives, with and without times."""
    data = _make_typed()
    links = _WRITES, data[_WRITES].edge_index[:, :16]
    times = torch.full((16,), 6)
    ways: tuple[dict[str, Any], ...] = ({}, {"time_attr": "time", "edge_label_time": times},
                                        {"time_attr": "edge_time", "edge_label_time": times})  # fmt: skip
    for options in ways:
        for negatives in (None, "binary", {"mode": "triplet", "amount": 2}):
            _read(pyg_direct.LinkNeighborLoader(data, _FANOUTS, links, neg_sampling=negatives, batch_size=8,
                                                device="cpu", **options))  # fmt: skip


def load_otherwise() -> None:
    """The other loaders, and walks."""
    data = _make_data()
    _read(pyg_direct.ShaDowKHopSampler(data, 2, 3, node_idx=_SEEDS, batch_size=8, device="cpu"),
          pyg_direct.RandomNodeLoader(data, 4, device="cpu"),
          pyg_direct.GraphSAINTRandomWalkSampler(data, 8, 2, num_steps=2, device="cpu"))  # fmt: skip
    # As in a program that has joined batches, and compared contents, for a while.
    with replaced(LoopChoice, "seconds", math.inf), replaced(compute_content_hash._Spent, "seconds", math.inf):
        for make in (_make_data, _make_typed):
            _read(pyg_direct.DataLoader([make() for _ in range(4)], 2, device="cpu"))
        dataset = InMemoryDataset()
        dataset.data, dataset.slices = InMemoryDataset.collate([_make_data() for _ in range(4)])
        _read(pyg_direct.DataLoader(dataset, 2, device="cpu"))
    topology = pyg_direct.CSRTopo(data.edge_index, num_nodes=_NODES)
    pyg_direct.random_walk(topology, _SEEDS, 3)
    pyg_direct.random_walk(topology, _SEEDS, 3, p=2.0, q=0.5)


def train_layers() -> None:
    """Passes of accelerated layers in both directions, on a batch and on a whole graph."""
    data = _make_data()
    (batch,) = pyg_direct.NeighborLoader(data, _FANOUTS, _SEEDS, batch_size=16, device="cpu")
    for kind in (GraphSAGE, GCN, GIN, GAT):
        _train(kind(_WIDTH, 64, num_layers=2, out_channels=4), batch, data)
    for aggregation in ("max", "min", "std"):
        _train(SAGEConv(_WIDTH, 64, aggr=aggregation), batch)


def train_typed_layers() -> None:
    """Passes of accelerated layers over several relations, in both directions."""
    data = _make_typed()
    (batch,) = pyg_direct.NeighborLoader(data, _FANOUTS, ("paper", _SEEDS), batch_size=16, device="cpu")
    for make in (lambda: SAGEConv(_WIDTH, 64), lambda: GATConv(_WIDTH, 64, add_self_loops=False)):
        _train(HeteroConv({relation: make() for relation in data.edge_types}, aggr="sum"), batch)


def train_snapshots() -> None:
    """A recurrent layer over a stream of snapshots."""
    from pyg_direct.dynamic import FrameTrainer
    from pyg_direct.dynamic.nn import TGCN

    signal = synthetic_dtdg(num_nodes=_NODES, num_edges=_EDGES, num_snapshots=4)
    width = signal[0].x.shape[1]

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.out = TGCN(width, 8), torch.nn.Linear(8, 1)

        def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            state = self.layer(x, edge_index, weight, state)
            return self.out(state).view(-1), state

    model = Model()
    FrameTrainer(model, signal, torch.optim.Adam(model.parameters()), window=2, device="cpu").fit(2)


def cut_into_parts() -> None:
    """A partition of a graph, with rows."""
    from pyg_direct.distributed import partition_graph

    data = _make_data()
    with tempfile.TemporaryDirectory() as folder:
        for method in ("hash", "streaming"):
            partition_graph(Path(folder) / method, data.edge_index, 2, num_nodes=_NODES, method=method,
                            node_rows={"x": data.x})  # fmt: skip


CASES: dict[str, Callable[[], None]] = {
    "uniform": sample_uniformly,
    "rows": read_rows,
    "times": sample_by_time,
    "weights": sample_by_weight,
    "links": sample_links,
    "types": sample_types,
    "typed-links": sample_typed_links,
    "loaders": load_otherwise,
    "layers": train_layers,
    "typed-layers": train_typed_layers,
    "snapshots": train_snapshots,
    "partition": cut_into_parts,
}


def run_case(name: str) -> None:
    """Run a case as small work of one thread, as large work that all threads share, and in a thread's place."""
    case = CASES[name]
    case()
    with replaced(run_kernel, "FEW_ITEMS", -1):
        case()
    before = run_alone(True)
    try:
        case()
    finally:
        run_alone(before)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for part in sys.argv[1:] or CASES:
        run_case(part)
