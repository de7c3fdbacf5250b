"""Threads change when a batch on the CPU is ready, never the batch."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pyg_direct import CSRTopo
from pyg_direct.kernels.jit import set_cpu_threads
from pyg_direct.sampling.host import CpuPlan
from pyg_direct.sampling.sample import Recipe, Sample
from tests.graphs import make_random_graph

FANOUTS = (4, 3, 2)
BATCHES = [torch.arange(number, number + 9) for number in range(40)]


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = set_cpu_threads(2)
    yield
    set_cpu_threads(before)


def make_plan() -> CpuPlan:
    graph = make_random_graph(300, 4000)
    return CpuPlan(CSRTopo(graph.edge_index, num_nodes=300).place("cpu", "cpu"), Recipe(FANOUTS))


def parts(sample: Sample) -> tuple[list[int], list[list[int]], list[int], list[int]]:
    return sample.n_id.tolist(), sample.edge_index.tolist(), sample.e_id.tolist(), sample.edge_counts


def test_one_thread_and_two_sample_equal_batches():
    plan = make_plan()
    of_two = [parts(plan.sample(seeds, key)) for key, seeds in enumerate(BATCHES)]

    set_cpu_threads(1)
    of_one = [parts(plan.sample(seeds, key)) for key, seeds in enumerate(BATCHES)]

    assert of_one == of_two


@pytest.mark.parametrize("threads_each", [1, 2])
def test_batches_sampled_side_by_side_are_equal(threads_each):
    plan = make_plan()
    one_by_one = [parts(plan.sample(seeds, key)) for key, seeds in enumerate(BATCHES)]

    with ThreadPoolExecutor(4, initializer=set_cpu_threads, initargs=(threads_each,)) as pool:
        side_by_side = list(pool.map(plan.sample, BATCHES, range(len(BATCHES))))

    assert list(map(parts, side_by_side)) == one_by_one
