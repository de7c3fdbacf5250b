"""A job's batches are sampled once each, in order, whoever samples them."""

import threading
import time

import pytest
import torch

from pyg_direct import CSRTopo, GraphSageSampler, MixedGraphSageSampler, SampleJob
from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError
from pyg_direct.sampling import mixed_cpu_gpu
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
    assert (sampler.num_on_gpu, sampler.num_on_cores, len(sampler), job.num_shuffles) == (0, 11, 11, 2)


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


def test_a_core_that_is_late_holds_nothing_up_and_is_not_asked_again(monkeypatch):
    # The GPU samples two batches alone, then cores are tried.
    monkeypatch.setattr(mixed_cpu_gpu, "_JUDGED_BATCHES", 1)
    job, release, asked = Job(), threading.Event(), []
    sampler = MixedGraphSageSampler(job, 2, make_topo(), [3, 2], mode="CPU_ONLY", seed=1)
    # Stands for a GPU.
    sampler._gpu = GraphSageSampler(make_topo(), [3, 2], device="cpu", seed=1)

    def sample_late(seeds, key, real=GraphSageSampler.sample):
        asked.append(key)
        assert release.wait(20)
        return real(sampler._gpu, seeds, key=key)

    for core in sampler._on_cores:
        monkeypatch.setattr(core, "sample", sample_late)
    results = iter(sampler)
    first = [str(next(results)) for _ in range(len(job))]
    threading.Timer(0.3, release.set).start()
    assert next(results, None) is None
    # Who is asked for the first time may compile; whoever is late once more is not asked again.
    release.clear()
    results = iter(sampler)
    second = [str(next(results)) for _ in range(len(job))]
    threading.Timer(0.3, release.set).start()
    assert next(results, None) is None
    third = [str(result) for result in sampler]

    assert [first, second, third] == [expect(job, epoch) for epoch in range(3)]
    assert (sampler.num_on_gpu, sampler.num_on_cores, len(asked)) == (11, 0, 2)


def test_without_cores_the_gpu_samples_alone():
    job = Job()
    sampler = MixedGraphSageSampler(job, 1, make_topo(), [3, 2], mode="CPU_ONLY", seed=1)
    # Stands for a GPU.
    sampler._gpu, sampler._on_cores = GraphSageSampler(make_topo(), [3, 2], device="cpu", seed=1), []

    epochs = [[str(result) for result in sampler] for _ in range(2)]

    assert epochs == [expect(job, 0), expect(job, 1)]
    assert (sampler.num_on_gpu, sampler.num_on_cores) == (11, 0)


def test_cores_that_are_fast_enough_help(monkeypatch):
    job = Job(7 * 60)
    sampler = MixedGraphSageSampler(job, 2, make_topo(), [3, 2], mode="CPU_ONLY", seed=1)
    # Stands for a GPU that is slower than a core.
    sampler._gpu = gpu = GraphSageSampler(make_topo(), [3, 2], device="cpu", seed=1)

    def sample_slowly(seeds, key, real=gpu.sample):
        time.sleep(0.01)
        return real(seeds, key=key)

    monkeypatch.setattr(gpu, "sample", sample_slowly)

    epochs = [[str(result) for result in sampler] for _ in range(2)]

    assert epochs == [expect(job, 0), expect(job, 1)]
    assert sampler.num_on_cores > 10


@pytest.mark.parametrize("pause", [None, 0, 20])
def test_cores_that_make_the_gpu_slower_are_let_go(monkeypatch, pause):
    job, busy, made = Job(7 * 60), [], []
    sampler = MixedGraphSageSampler(job, 2, make_topo(), [3, 2], mode="CPU_ONLY", seed=1)
    # Stands for a GPU, which compiles at first, or a loop that pauses.
    sampler._gpu = gpu = GraphSageSampler(make_topo(), [3, 2], device="cpu", seed=1)

    def sample(seeds, key, real=gpu.sample):
        time.sleep(0.02 if busy else 0.001 if len(made) != pause else 0.5)
        made.append(key)
        return real(seeds, key=key)

    def sample_on_core(seeds, key, real=GraphSageSampler.sample):
        busy.append(key)
        try:
            time.sleep(0.01)
            return real(sampler._spare, seeds, key=key)
        finally:
            busy.pop()

    sampler._spare = GraphSageSampler(make_topo(), [3, 2], device="cpu", seed=1)
    monkeypatch.setattr(gpu, "sample", sample)
    for core in sampler._on_cores:
        monkeypatch.setattr(core, "sample", sample_on_core)

    tried = 0
    for epoch in range(5):
        assert [str(result) for result in sampler] == expect(job, epoch)
        tried += sampler.num_on_cores

    assert tried > 0
    assert sampler.num_on_cores == 0


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
def test_gpu_and_cores_sample_every_batch_in_order(mode):
    job = Job(7 * 200)
    sampler = MixedGraphSageSampler(job, 2, make_topo(), [3, 2], "cuda", mode, seed=1)
    counts = []

    for epoch in range(4):
        results = list(sampler)
        got = [str((n_id.cpu(), size, [adj.to("cpu") for adj in adjs])) for n_id, size, adjs in results]
        counts.append((sampler.num_on_gpu, sampler.num_on_cores))

        assert {n_id.device.type for n_id, _, _ in results} == {"cuda"}
        assert got == expect(job, epoch)

    assert [sum(both) for both in counts] == [200] * 4
    # It is tried whether they help.
    assert (sum(both[1] for both in counts) > 0) == mode.endswith("MIXED")
