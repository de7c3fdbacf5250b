"""Batches made ahead by exchange never wait for DDP's own collectives, nor these for them, whatever comes first."""

import faulthandler
import random
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from pyg_direct import LinkNeighborLoader, NeighborLoader
from pyg_direct.distributed import DistLinkNeighborLoader, DistNeighborLoader, DistSubGraphLoader
from tests.distributed.ranks import make_data, open_graph, write_data
from tests.processes import run_ranks

SEEDS, LINKS = torch.arange(0, 300, 6), torch.arange(60).view(2, 30)
# (kind of loader, batches made ahead, what happens at the end of an uneven epoch)
EPOCHS = [("nodes", 1, "keep"), ("links", 2, "pad"), ("shared out", 1, "pad"), ("shared out", 3, "keep")]


def make_loader(kind, graph=None, data=None, **options):
    """A loader in step with others, or the one of one process."""
    if kind == "links":
        args, common = ([2], LINKS), {"batch_size": 6, "seed": 4}
        return DistLinkNeighborLoader(graph, *args, **common, **options) if graph else LinkNeighborLoader(
            data, *args, **common, device="cpu")  # fmt: skip
    args, common = ([3, 2], SEEDS), {"batch_size": 12, "shuffle": True, "seed": 3}
    if kind == "nodes" and graph is not None:
        return DistNeighborLoader(graph, *args, **common, **options)
    if options:
        options |= {"ranks": "auto", "cache_policy": "device_replicate", "cold_policy": "shard"}
    return NeighborLoader(data, *args, **common, **{"device": "cpu", **options})


def train(rank, folder, place):
    """Parameters and the nodes of all batches; each rank pauses where it likes, and asks for batches when it likes."""
    # Instead of waiting for ever.
    faulthandler.dump_traceback_later(240, exit=True)
    own, found, device, group = random.Random(rank), [], torch.device("cpu"), None
    if place == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(rank)
        group = dist.new_group(backend="nccl")

    def pause(out=None):
        time.sleep(own.choice([0, 0, 0.003, 0.01]))
        return out

    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(5, 1).to(device), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(batch, is_even):
        pause()
        optimizer.zero_grad()
        model(batch.x).pow(2).mean().backward()
        pause()
        optimizer.step()
        if is_even:
            dist.all_reduce(torch.ones(1, device=device), group=group)

    with open_graph(folder, timeout=60, device=device) as graph:
        for kind, prefetch, uneven in EPOCHS:
            options = {"device": device} if kind == "shared out" else {}
            loader = make_loader(kind, graph, make_data(), prefetch=prefetch, uneven=uneven,
                                 transform_sampler_output=pause, **options)  # fmt: skip
            # One leaves after a batch, and trains while the other is still here.
            for number, _ in enumerate(loader):
                if number == 2 * rank:
                    break
            nodes = []
            with Join([model], enable=uneven == "keep"):
                batches = iter(loader)
                batch = next(batches, None)
                while batch is not None:
                    nodes.append(batch.n_id.tolist())
                    # The next batch is waited for before the collectives of this one, or after.
                    comes_first = own.random() < 0.5
                    upcoming = next(batches, None) if comes_first else None
                    step(batch, uneven == "pad")
                    batch = upcoming if comes_first else next(batches, None)
            found.append(nodes)
        dist.barrier()
    faulthandler.cancel_dump_traceback_later()
    return [p.detach().cpu() for p in model.parameters()], found


@pytest.mark.slow
@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.gpus])])
def test_batches_made_ahead_and_ddp_in_any_order(tmp_path, place):
    data = make_data()
    write_data(tmp_path / "p", data, 2)

    (first, batches), (second, others) = run_ranks(train, 2, tmp_path / "p", place)

    assert all(map(torch.equal, first, second))
    for number, (kind, _, uneven) in enumerate(EPOCHS):
        alone = make_loader(kind, data=data)
        # The second epoch of each loader.
        _, expected = ([batch.n_id.tolist() for batch in alone] for _ in range(2))
        got = batches[number], others[number]
        assert [got[i % 2][i // 2] for i in range(len(expected))] == expected
        assert len(expected) % 2 == 1
        assert [len(own) for own in got] == [len(expected) // 2 + 1, len(expected) // 2 + (uneven == "pad")]


def train_as_the_readme_does(rank, folder):
    """Gradients of all steps of DDP in two epochs of each loader; each has 1 where its own step is."""
    faulthandler.dump_traceback_later(240, exit=True)
    found = {}
    for whole in (False, True):
        with open_graph(folder, share_graph=whole) as graph:
            own, common = torch.arange(30 + 25 * rank), {"batch_size": 10, "shuffle": True, "seed": 0}
            loaders = {"nodes": DistNeighborLoader(graph, [3, 2], SEEDS, **common),
                       "induced": DistSubGraphLoader(graph, [3, 2], SEEDS[:42], **common),
                       "links": DistLinkNeighborLoader(graph, [2], LINKS[:, :25], **common),
                       "own": DistNeighborLoader(graph, [2], own, ranks="own", **common)}  # fmt: skip
            for name, loader in loaders.items():
                model, steps = DistributedDataParallel(torch.nn.Linear(16, 1, bias=False)), []
                for epoch in range(2):
                    for number, _ in enumerate(loader):
                        model.zero_grad()
                        model(torch.eye(16)[8 * epoch + number]).backward()
                        steps.append((8 * epoch + number, model.module.weight.grad.view(-1).tolist()))
                found[whole, name] = steps
            dist.barrier()
    faulthandler.cancel_dump_traceback_later()
    return found


def test_ranks_of_ddp_are_at_one_batch_by_default(tmp_path):
    write_data(tmp_path / "p", make_data(), 2)

    ranks = run_ranks(train_as_the_readme_does, 2, tmp_path / "p")

    for name, count in {"nodes": 3, "induced": 3, "links": 2, "own": 6}.items():
        # Numbers of batches that two do not divide.
        steps = [8 * epoch + number for epoch in range(2) for number in range(count)]
        for found in ranks:
            for whole in (False, True):
                assert [step for step, _ in found[whole, name]] == steps
                assert all(gradient == torch.eye(16)[step].tolist() for step, gradient in found[whole, name])
