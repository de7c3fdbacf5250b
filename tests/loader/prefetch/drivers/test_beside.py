"""Loaders beside others who use the same device: loaders, threads, streams, captures and allocator settings."""

import os
import subprocess
import sys
import threading
from itertools import islice

import pytest
import torch

from pyg_direct import NeighborLoader
from tests.batches import hash_batches, make_data
from tests.graphs import make_random_graph

NUM_BATCHES = 12


def make_wide_data():
    return make_data(make_random_graph(3000, 60_000), x=torch.arange(3000 * 128).view(3000, 128).float())


def make_loader(device, seed=11, **options):
    return NeighborLoader(make_wide_data(), [7, 5, 3], batch_size=64, shuffle=True, seed=seed, device=device, **options)


@pytest.fixture(scope="module")
def expected():
    """Hash of the first batches, by seed."""
    return {seed: hash_batches(islice(make_loader("cpu", seed, prefetch=0), NUM_BATCHES)) for seed in (11, 12)}


def test_two_loaders_side_by_side(real_device, expected):
    loaders = [make_loader(real_device, seed) for seed in (11, 12)]

    first, second = zip(*islice(zip(*loaders, strict=True), NUM_BATCHES), strict=True)

    assert [hash_batches(first), hash_batches(second)] == [expected[11], expected[12]]


def test_two_loaders_in_two_threads(real_device, expected):
    got = {}

    def iterate(seed):
        got[seed] = [hash_batches(islice(make_loader(real_device, seed), NUM_BATCHES)) for _ in range(3)]

    threads = [threading.Thread(target=iterate, args=(seed,)) for seed in (11, 12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert got == {seed: [hash_] * 3 for seed, hash_ in expected.items()}


def test_two_threads_share_one_loader(real_device, expected):
    loader, got = make_loader(real_device), []

    def iterate():
        got.append(hash_batches(list(loader)[:NUM_BATCHES]))

    threads = [threading.Thread(target=iterate) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert expected[11] in got
    assert len(set(got)) == 2


@pytest.mark.gpu
class TestOnGpu:
    """Streams, captures and the allocator."""

    @pytest.mark.parametrize("prefetch", [0, 1, 3])
    def test_a_loop_in_a_stream_of_the_user(self, expected, prefetch):
        batches, stream = [], torch.cuda.Stream()

        with torch.cuda.stream(stream):
            for batch in islice(make_loader("cuda", prefetch=prefetch), NUM_BATCHES):
                assert torch.cuda.current_stream() == stream
                torch.cuda._sleep(1_000_000)
                # What was computed from a batch in this stream, before its memory is used again.
                batches.append(batch.clone())
                del batch
        stream.synchronize()

        assert hash_batches(batches) == expected[11]

    def test_a_stream_that_changes_between_batches(self, expected):
        batches, streams = [], [torch.cuda.Stream() for _ in range(2)]
        iterator = iter(make_loader("cuda"))

        for number in range(NUM_BATCHES):
            with torch.cuda.stream(streams[number % 2]):
                batches.append(next(iterator).clone())
        torch.cuda.synchronize()

        assert hash_batches(batches) == expected[11]

    def test_later_epochs_take_the_memory_of_those_before(self):
        loader = make_loader("cuda", prefetch=2)

        def run():
            # The same batches, so that no epoch needs more than another.
            loader.load_state_dict({"seed": 11, "epoch": 0, "batch": 0})
            for _ in loader:
                torch.cuda.synchronize()

        for _ in range(3):
            run()
        before = torch.cuda.memory_reserved()
        for _ in range(4):
            run()

        # What torch asks the driver for at a time; streams of their own would take as much for each kind of piece.
        assert torch.cuda.memory_reserved() - before <= 2 << 20

    @pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
    def test_a_user_captures_a_training_step_while_batches_are_made(self, expected, mode):
        model = torch.nn.Linear(128, 4).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 1e-12)
        x, graph, batches = torch.zeros(64, 128, device="cuda"), torch.cuda.CUDAGraph(), []

        def step():
            optimizer.zero_grad(set_to_none=True)
            model(x).square().mean().backward()
            optimizer.step()

        for number, batch in enumerate(islice(make_loader("cuda", prefetch=2, placement="unified"), NUM_BATCHES)):
            x.copy_(batch.x[:64])
            if number < 3:
                step()
            elif number == 3:
                with torch.cuda.graph(graph, capture_error_mode=mode):
                    step()
            graph.replay() if number >= 3 else None
            batches.append(batch)
        torch.cuda.synchronize()

        assert hash_batches(batches) == expected[11]

    @pytest.mark.slow
    @pytest.mark.parametrize("setting", ["expandable_segments:True", "backend:cudaMallocAsync"])
    def test_other_settings_of_the_allocator(self, expected, setting):
        script = (
            "import tests.loader.prefetch.drivers.test_beside as t, torch\n"
            "batches = [b.clone() for b in t.islice(t.make_loader('cuda', prefetch=2), t.NUM_BATCHES)]\n"
            "print(t.hash_batches(batches))\n"
        )
        environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting, "PYTHONPATH": os.pathsep.join(sys.path)}

        done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)

        assert done.returncode == 0, done.stderr
        assert done.stdout.split()[-1] == expected[11]
