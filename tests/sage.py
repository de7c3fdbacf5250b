"""Common parts of the tests of `GraphSageSampler`."""

from pyg_direct import CSRTopo, GraphSageSampler
from tests.graphs import GRAPHS

GRAPH = GRAPHS["random"]
SEEDS = [3, 69, 3, 0]


def make_sampler(device="cpu", sizes=(3, 2), graph=GRAPH, **options):
    topo = CSRTopo(graph.edge_index, num_nodes=graph.num_nodes)
    return GraphSageSampler(topo, list(sizes), device, **({"seed": 7} | options))
