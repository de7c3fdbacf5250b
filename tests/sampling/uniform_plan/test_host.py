"""Threads change when a batch on the CPU is ready, never the batch."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pyg_direct import CSRTopo
from pyg_direct.compiler.jit import CpuKernel, get_cpu_threads, set_cpu_threads
from pyg_direct.ops import run_kernel
from pyg_direct.sampling.sampling_options import Recipe, Sample
from pyg_direct.sampling.uniform_plan import CpuPlan
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


def test_one_thread_samples_small_batches_until_a_large_one_comes(monkeypatch):
    threads = []
    run = CpuKernel.__call__
    monkeypatch.setattr(CpuKernel, "__call__", lambda *args: (threads.append(get_cpu_threads()), run(*args))[1])
    monkeypatch.setattr(run_kernel, "FEW_ITEMS", 9 * (4 + 4 * 3 + 4 * 3 * 2))
    plan, others = make_plan(), get_cpu_threads()

    def find_threads(num_seeds):
        threads.clear()
        return plan.sample(torch.arange(num_seeds), 1).edge_counts[-1], set(threads)

    assert [find_threads(num_seeds)[1] for num_seeds in (9, 2)] == [{1}, {1}]
    # Of more seeds than before there could be as many edges as that.
    num_edges, used = find_threads(10)
    assert used == {others}
    # What comes after goes by how many there were.
    for few, expected in ((num_edges, {1}), (num_edges - 1, {others})):
        monkeypatch.setattr(run_kernel, "FEW_ITEMS", few)
        assert find_threads(2)[1] == expected
    assert get_cpu_threads() == others


@pytest.mark.parametrize("threads_each", [1, 2])
def test_batches_sampled_side_by_side_are_equal(threads_each):
    plan = make_plan()
    one_by_one = [parts(plan.sample(seeds, key)) for key, seeds in enumerate(BATCHES)]

    with ThreadPoolExecutor(4, initializer=set_cpu_threads, initargs=(threads_each,)) as pool:
        side_by_side = list(pool.map(plan.sample, BATCHES, range(len(BATCHES))))

    assert list(map(parts, side_by_side)) == one_by_one
