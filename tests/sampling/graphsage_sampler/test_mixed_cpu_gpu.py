"""A job's batches are sampled once each, in order, by a GPU or by cores."""

import threading

import pytest
import torch

from pyg_direct import CSRTopo, GraphSageSampler, MixedGraphSageSampler, SampleJob
from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError
from pyg_direct.sampling.random_key import batch_key
from tests.graphs import make_random_graph


class Job(SampleJob):
    """Ten batches of seven seeds, and a half one."""

    def __init__(self, num_seeds=74):
        self.seeds, self.num_shuffles = torch.arange(num_seeds) % 70, 0

    def __getitem__(self, index):
        return self.seeds[7 * index : 7 * index + 7]

    def __len__(self):
        return -(-len(self.seeds) // 7)

    def shuffle(self):
        self.num_shuffles += 1


def make_topo():
    return CSRTopo(make_random_graph(70, 600).edge_index, num_nodes=70)


def expect(job, epoch):
    sampler = GraphSageSampler(make_topo(), [3, 2], device="cpu")
    return [str(sampler.sample(job[i], key=batch_key(1, epoch, i))) for i in range(len(job))]


@pytest.mark.parametrize("num_workers", [1, 3])
def test_cores_sample_every_batch_in_order(num_workers):
    job = Job()
    sampler = MixedGraphSageSampler(job, num_workers, make_topo(), [3, 2], mode="CPU_ONLY", seed=1)

    epochs = [[str(result) for result in sampler] for _ in range(2)]

    assert epochs == [expect(job, 0), expect(job, 1)]
    assert epochs[0] != epochs[1]
    assert (len(sampler), job.num_shuffles) == (11, 2)


def test_an_empty_job_has_no_batches():
    assert list(MixedGraphSageSampler(Job(0), 2, make_topo(), [3], mode="CPU_ONLY")) == []


def test_an_error_is_raised_where_its_batch_is_due():
    job = Job()
    job.seeds[30] = 99
    results = iter(MixedGraphSageSampler(job, 2, make_topo(), [3], mode="CPU_ONLY"))

    got = [next(results)[1] for _ in range(4)]

    assert got == [7] * 4
    with pytest.raises(IdError, match="input_nodes"):
        next(results)


def test_an_error_of_the_job_is_raised_where_its_batch_is_due():
    class BadJob(Job):
        def __getitem__(self, index):
            if index == 4:
                raise RuntimeError("no seeds for batch 4")
            return super().__getitem__(index)

    results = iter(MixedGraphSageSampler(BadJob(), 3, make_topo(), [3], mode="CPU_ONLY"))

    assert [next(results)[1] for _ in range(4)] == [7] * 4
    with pytest.raises(RuntimeError, match="no seeds for batch 4"):
        next(results)


def test_leaving_early_ends_the_threads():
    before = threading.active_count()

    results = iter(MixedGraphSageSampler(Job(), 3, make_topo(), [3], mode="CPU_ONLY"))
    next(results)
    results.close()

    assert threading.active_count() <= before


@pytest.mark.parametrize("num_batches", [1, 2, 5])
def test_as_many_batches_are_sampled_ahead_as_there_are_cores(num_batches):
    asked = []

    class Watched(Job):
        def __getitem__(self, index):
            asked.append(index)
            return super().__getitem__(index)

    results = iter(MixedGraphSageSampler(Watched(7 * num_batches), 3, make_topo(), [3], mode="CPU_ONLY"))
    next(results)

    assert asked == list(range(min(3, num_batches)))
    assert len(list(results)) == num_batches - 1


def test_a_gpu_samples_alone():
    job = Job()
    sampler = MixedGraphSageSampler(job, 1, make_topo(), [3, 2], mode="CPU_ONLY", seed=1)
    # Stands for a GPU.
    sampler._gpu, sampler._on_cores = GraphSageSampler(make_topo(), [3, 2], device="cpu", seed=1), []

    epochs = [[str(result) for result in sampler] for _ in range(2)]

    assert epochs == [expect(job, 0), expect(job, 1)]


@pytest.mark.parametrize(("job", "options", "error", "message"), [
    (3, {}, ArgumentTypeError, "sample_job must be a SampleJob, got int"),
    (Job(), {"num_workers": -1}, ArgumentError, "num_workers must be an integer of at least 0, got -1"),
    (Job(), {"num_workers": 0}, ArgumentError, "num_workers must be at least 1 where only the CPU samples"),
    (Job(), {"device": "cpu", "mode": "UVA_CPU_MIXED"}, ArgumentError,
     "mode='UVA_CPU_MIXED' needs a GPU, got device='cpu': give mode='CPU_ONLY'"),
    (Job(), {"mode": "ALL"}, ArgumentError, "mode must be one of UVA_CPU_MIXED"),
])  # fmt: skip
def test_bad_arguments_are_named(job, options, error, message):
    options = {"num_workers": 1, "mode": "CPU_ONLY", **options}

    with pytest.raises(error, match=message):
        MixedGraphSageSampler(job, csr_topo=make_topo(), sizes=[3], **options)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["UVA_CPU_MIXED", "GPU_CPU_MIXED", "UVA_ONLY", "GPU_ONLY"])
def test_a_gpu_samples_every_batch_in_order(mode):
    job = Job()
    sampler = MixedGraphSageSampler(job, 2, make_topo(), [3, 2], "cuda", mode, seed=1)

    for epoch in range(2):
        results = list(sampler)

        assert {n_id.device.type for n_id, _, _ in results} == {"cuda"}
        got = [str((n_id.cpu(), size, [adj.to("cpu") for adj in adjs])) for n_id, size, adjs in results]
        assert got == expect(job, epoch)
