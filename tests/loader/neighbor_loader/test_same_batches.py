"""A batch is a function of seed, epoch, number and seeds: equal on every device, wherever rows live, at any pace."""

from itertools import islice

import pytest
import torch

from pyg_direct import NeighborLoader
from pyg_direct.compiler.jit import set_cpu_threads
from tests.batches import hash_batches, make_data
from tests.graphs import make_random_graph

NUM_BATCHES = 12
# May only change with a minor version of the package.
GOLDEN = "419a27087f65f424b8ed4d2b556a23effedcd8db603770e084f5c6d5efe0d31b"


def make_small_data():
    return make_data(make_random_graph(20, 90), extra=torch.arange(20, dtype=torch.int16) * 3)


def make_large_data():
    """Wide, odd and one-byte rows over a graph with hubs."""
    graph = make_random_graph(3000, 60_000)
    return make_data(
        graph,
        x=torch.arange(3000 * 128).view(3000, 128).float(),
        odd=torch.arange(3000 * 7).view(3000, 7).to(torch.int16),
        train_mask=torch.arange(3000) % 3 == 0,
    )


def make_loader(data, **options):
    return NeighborLoader(data, [7, 5, 3], batch_size=64, shuffle=True, seed=11, **options)


def hash_epoch(data, **options):
    """Hash of the first batches of a shuffled epoch."""
    return hash_batches(islice(make_loader(data, **options), NUM_BATCHES))


def test_batches_are_frozen(device):
    loader = NeighborLoader(make_small_data(), [3, 2], batch_size=7, shuffle=True, seed=2**63 + 5, device=device)

    got = hash_batches(loader)

    assert got == GOLDEN


def test_the_number_of_threads_changes_no_batch():
    before = set_cpu_threads(1)
    expected = hash_epoch(make_large_data(), device="cpu")

    set_cpu_threads(2)
    got = hash_epoch(make_large_data(), device="cpu")
    set_cpu_threads(before)

    assert got == expected


@pytest.fixture(scope="module")
def expected():
    return hash_epoch(make_large_data(), device="cpu")


@pytest.mark.gpu
class TestOnGpu:
    """Equal to the CPU in every byte."""

    @pytest.mark.parametrize("cache", [None, 0, "20%", "1G"])
    @pytest.mark.parametrize("prefetch", [0, 1, 3])
    @pytest.mark.parametrize("placement", ["auto", "cuda", "unified", "pinned"])
    def test_placement_pace_and_cache_change_no_batch(self, expected, placement, prefetch, cache):
        options = {"placement": placement, "prefetch": prefetch, "feature_cache": cache}

        got = hash_epoch(make_large_data(), device="cuda", **options)

        assert got == expected

    def test_a_second_loader_over_moved_rows_changes_no_batch(self, expected):
        data = make_large_data()

        hashes = [hash_epoch(data, device="cuda", placement=placement) for placement in ("unified", "pinned", "cuda")]
        hashes.append(hash_epoch(data, device="cpu"))

        assert hashes == [expected] * 4

    def test_data_on_the_gpu_changes_no_batch(self, expected):
        got = hash_epoch(make_large_data().to("cuda"), device="cuda")

        assert got == expected

    def test_work_on_the_current_stream_changes_no_batch(self, expected):
        batches = []

        for batch in islice(make_loader(make_large_data(), placement="unified"), NUM_BATCHES):
            torch.cuda._sleep(1_000_000)
            batches.append(batch)
            torch.full((4000, 128), -1.0, device="cuda")

        assert hash_batches(batches) == expected

    @pytest.mark.parametrize("prefetch", [0, 1, 3])
    def test_epochs_side_by_side_change_no_batch(self, expected, prefetch):
        other = make_loader(make_large_data(), device="cpu")
        other.load_state_dict({"seed": 11, "epoch": 1, "batch": 0})
        loader = make_loader(make_large_data(), prefetch=prefetch)

        first, second = zip(*islice(zip(loader, loader, strict=True), NUM_BATCHES), strict=True)

        assert hash_batches(first) == expected
        assert hash_batches(second) == hash_batches(islice(other, NUM_BATCHES))
