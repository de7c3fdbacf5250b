"""Models whose passes are replayed, trained by several processes with DDP: gradients of all of them."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.nn.convolutions import assert_near
from tests.nn.replays import find_gradients, make_graph, make_loader, make_model, make_pair, record_anywhere
from tests.processes import run_ranks

STEPS = 16


def train(rank, kind):
    """Return (losses, parameters) of a replayed and of an ordinary model, and the number of replays."""
    device = torch.device(kind, rank if kind == "cuda" else None)
    if kind == "cuda":
        torch.cuda.set_device(device)
    with pytest.MonkeyPatch.context() as patch:
        record_anywhere(device, patch)
        group = dist.new_group(backend="nccl" if kind == "cuda" else "gloo")
        graph = make_graph()
        ordinary, model, replay = make_pair(make_model(graph, device))
        loader = make_loader(graph, device, shuffle=True, ranks=(rank, 2), drop_last=True)
        batches = [batch for _ in range(4) for batch in loader][:STEPS]
        found = []
        for trained in (model, ordinary):
            held = DistributedDataParallel(trained, process_group=group)
            optimizer = torch.optim.Adam(held.parameters(), lr=0.01)
            losses = []
            for batch in batches:
                losses.append(float(find_gradients(held, batch)[0]))
                optimizer.step()
            found.append((torch.tensor(losses), [part.detach().cpu() for part in trained.parameters()]))
        return found, replay.replayed, replay.reason


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.gpus])])
def test_processes_train_as_with_ordinary_passes(kind):
    ranks = run_ranks(train, 2, kind)

    for (replayed, ordinary), count, reason in ranks:
        assert count >= 4
        assert reason is None
        torch.testing.assert_close(replayed[0], ordinary[0], rtol=1e-2, atol=1e-3)
    (first, _), (second, _) = (found for found, *_ in ranks)
    assert_near(first[1], second[1])
    assert not torch.equal(first[0], second[0])
