"""Memory that runs out, and what is left behind by loops that end before their epoch."""

import gc
import itertools
from pathlib import Path

import pytest
import torch

from pyg_direct import Feature, NeighborLoader
from pyg_direct.errors import CudaError, MemoryLimitError, PlacementWarning
from pyg_direct.loader.prefetch.drivers import Pipeline
from pyg_direct.sampling.sampling_options import empty_sample
from tests.batches import hash_batches, make_data
from tests.graphs import make_random_graph

NUM_BATCHES = 8
ERRORS = {
    "torch": lambda: torch.OutOfMemoryError("CUDA out of memory"),
    "driver": lambda: CudaError("cuLaunchKernel", 2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"),
}


class Fragile:
    """A pipeline whose fetch of one batch runs out of memory so many times; batch k holds 10 * k."""

    def __init__(self, device, prefetch, fail_at, times, what="fetch", error="torch"):
        self._device, self._fail_at, self.left, self._what, self._error = device, fail_at, times, what, error
        work = ((number, torch.tensor([10 * number])) for number in range(NUM_BATCHES))
        self.pipeline = Pipeline(work, self._submit, self._fetch, prefetch, device)
        self.pipeline.prefetch = prefetch

    def _fail(self, what, number):
        if (what, number) == (self._what, self._fail_at) and self.left > 0:
            self.left -= 1
            raise ERRORS[self._error]()

    def _submit(self, number, positions):
        self._fail("submit", number)
        return empty_sample(positions.to(self._device), 1)

    def _fetch(self, sample, number, positions):
        self._fail("fetch", number)
        return sample.n_id + positions.to(self._device) - sample.n_id


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("what", ["submit", "fetch"])
@pytest.mark.parametrize("fail_at", [0, 1, 3, 7])
@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_a_batch_that_did_not_fit_is_made_again(real_device, prefetch, fail_at, what, error):
    fragile = Fragile(real_device, prefetch, fail_at, 1, what, error)

    with pytest.warns(PlacementWarning, match=f"ran out with prefetch={prefetch}") as caught:
        got = [(number, batch.item()) for number, batch in fragile.pipeline]

    assert got == [(number, 10 * number) for number in range(NUM_BATCHES)]
    assert fragile.pipeline.prefetch == prefetch // 2
    assert len(caught) == 1


def test_it_shrinks_until_it_fits_with_one_warning(real_device):
    fragile = Fragile(real_device, 5, 6, 3)

    with pytest.warns(PlacementWarning) as caught:
        got = [number for number, _ in fragile.pipeline]

    assert got == list(range(NUM_BATCHES))
    assert (fragile.pipeline.prefetch, fragile.left, len(caught)) == (0, 0, 1)


@pytest.mark.parametrize("prefetch", [0, 1, 4])
@pytest.mark.filterwarnings("ignore:GPU memory ran out with prefetch")
def test_a_batch_that_never_fits_raises_at_its_turn(real_device, prefetch):
    fragile = Fragile(real_device, prefetch, 3, 99)

    got = [next(fragile.pipeline)[0] for _ in range(3)]
    with pytest.raises(torch.OutOfMemoryError):
        next(fragile.pipeline)

    assert got == [0, 1, 2]
    assert next(fragile.pipeline, None) is None


def test_what_a_plan_says_of_memory_counts_too(real_device):
    def submit(number, positions):
        if next(calls) == 0:
            raise MemoryLimitError("a plan must fit") from torch.OutOfMemoryError("CUDA out of memory")
        return empty_sample(positions.to(real_device), 1)

    calls = itertools.count()
    work = iter([(0, torch.tensor([5]))])
    pipeline = Pipeline(work, submit, lambda sample, number, positions: number, 2, real_device)
    pipeline.prefetch = 2

    with pytest.warns(PlacementWarning, match="ran out"):
        got = list(pipeline)

    assert got == [(0, 0)]


def make_wide_data(width=128):
    graph = make_random_graph(3000, 60_000)
    return make_data(graph, x=torch.arange(3000 * width).view(3000, width).float())


class TestLeaving:
    """100 loops that end early leave no memory behind."""

    def leave(self, loader):
        next(iter(loader))

    def fail_in_transform(self, loader):
        loader.transform = self.fail_at(2)
        with pytest.raises(KeyError):
            list(loader)

    def fail_in_fetch(self, loader):
        loader.transform_sampler_output = self.fail_at(2)
        with pytest.raises(KeyError):
            list(loader)

    def fail_at(self, number):
        def count(item):
            if next(calls) == number:
                raise KeyError("third")
            return item

        calls = itertools.count()
        return count

    @pytest.mark.parametrize("how", ["leave", "fail_in_transform", "fail_in_fetch"])
    @pytest.mark.full
    def test_memory_does_not_grow(self, real_device, how):
        loader = NeighborLoader(make_wide_data(), [7, 5, 3], batch_size=64, seed=1, device=real_device, prefetch=2)
        used = allocated_bytes if real_device.type == "cuda" else resident_bytes
        expected = hash_batches(itertools.islice(loader, 4))
        for _ in range(10):
            getattr(self, how)(loader)
        before = used()

        for _ in range(100):
            getattr(self, how)(loader)

        # A batch holds more than a megabyte.
        assert used() - before < (1 if real_device.type == "cuda" else 50) * 2**20
        loader.transform = loader.transform_sampler_output = None
        loader.load_state_dict({"seed": 1, "epoch": 0, "batch": 0})
        assert hash_batches(itertools.islice(loader, 4)) == expected


def allocated_bytes():
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def resident_bytes():
    """Without pages of files, of libraries for one, which the system takes away and brings back."""
    gc.collect()
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * 4096


@pytest.mark.gpu
class TestOutOfGpuMemory:
    """Memory that is really gone."""

    @pytest.fixture(autouse=True)
    def looks_free(self, monkeypatch):
        """What a limit of torch leaves seems to be all, as where others took memory since it was asked for."""
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda index=None: 1.0)

    def test_fetching_ahead_shrinks(self, little_memory):
        data = make_wide_data(8192)
        options = {"batch_size": 500, "seed": 1, "placement": "unified"}
        expected = hash_batches(NeighborLoader(data, [20, 20], **options, prefetch=0))
        loader = NeighborLoader(data, [20, 20], **options, prefetch=4)
        next(iter(loader))
        loader.load_state_dict({"seed": 1, "epoch": 0, "batch": 0})
        # A batch has all 3,000 rows of 32 KiB.
        little_memory(320 << 20)

        with pytest.warns(PlacementWarning, match="ran out with prefetch=4"):
            got = hash_batches(loader)

        assert got == expected
        assert loader.prefetch < 4

    def test_a_cache_shrinks(self, little_memory):
        rows = torch.arange(1 << 26).view(1 << 16, -1).float()
        ids = torch.randint(1 << 16, (1000,))
        expected = rows[ids]
        little_memory(140 << 20)

        with pytest.warns(PlacementWarning, match="GPU memory ran out for 209715200 bytes"):
            feature = Feature(device_cache_size="200M").from_cpu_tensor(rows)

        assert 0 < feature.num_hot_rows <= 100 << 8
        assert torch.equal(feature[ids].cpu(), expected)

    def test_a_table_that_should_go_whole_goes_in_part(self, little_memory):
        rows = torch.arange(1 << 26).view(1 << 16, -1).float()
        expected = rows[:7].clone()
        little_memory(100 << 20)

        with pytest.warns(PlacementWarning, match="GPU memory ran out"):
            feature = Feature(device_cache_size="1G").from_cpu_tensor(rows)

        assert 0 < feature.num_hot_rows < 1 << 16
        assert torch.equal(feature[torch.arange(7)].cpu(), expected)

    def test_a_topology_goes_to_the_host(self, little_memory):
        data = make_data(make_random_graph(3000, 16_000_000), edge_attr=None)
        expected = hash_batches(itertools.islice(NeighborLoader(data, [5, 5], batch_size=9, device="cpu", seed=1), 3))
        # Enough for the edge ids, 64 MB, but not for the neighbors beside them, nor with what tests before left free.
        little_memory(80 << 20)

        loader = NeighborLoader(data, [5, 5], batch_size=9, seed=1)
        with pytest.warns(PlacementWarning, match="the topology goes to unified memory"):
            iterator = iter(loader)

        assert hash_batches(itertools.islice(iterator, 3)) == expected
