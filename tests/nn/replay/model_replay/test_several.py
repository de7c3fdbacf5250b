"""Several passes of a model before their backward, of batches of one kind or of several: all are replayed."""

import pytest
import torch

from pyg_direct.nn.replay import model_replay
from tests.nn.convolutions import assert_near
from tests.nn.replays import make_graph, make_loader, make_model, make_pair, run_trimmed, run_whole


@pytest.fixture(scope="module")
def graph():
    return make_graph()


def find_gradients(model, calls):
    model.zero_grad()
    outs = [run(model, batch)[: batch.batch_size] for run, batch in calls]
    loss = sum((number + 1) * out.square().mean() for number, out in enumerate(outs))
    loss.backward()
    return [loss.detach(), *(part.grad for part in model.parameters())]


@pytest.mark.parametrize("runs", [(run_trimmed, run_whole), (run_trimmed,) * 3, (run_trimmed, run_whole, run_whole)])
def test_passes_before_one_backward_are_replayed(graph, device, runs, monkeypatch):
    monkeypatch.setattr(model_replay, "_WARM_UP", 2)
    batches = [*make_loader(graph, device, drop_last=True)][:15]
    ordinary, model, replay = make_pair(make_model(graph, device))

    most = 0
    for begin in range(12):
        calls = list(zip(runs, batches[begin:], strict=False))
        before = replay.replayed
        assert_near(find_gradients(model, calls), find_gradients(ordinary, calls))
        most = max(most, replay.replayed - before)

    assert replay.reason is None
    assert most == len(runs)


def test_a_model_that_changes_keeps_one_recording(graph, device, monkeypatch):
    monkeypatch.setattr(model_replay, "_WARM_UP", 2)
    batches = [*make_loader(graph, device, drop_last=True)]
    ordinary, model, replay = make_pair(make_model(graph, device))
    for batch in batches[:5]:
        find_gradients(model, [(run_trimmed, batch), (run_whole, batch)])
    assert len(replay._passes[True, True]) == 2

    for trained in (model, ordinary):
        trained.convs[0].lin_l.weight.requires_grad_(False)
    for batch in batches[5:10]:
        found = [find_gradients(trained, [(run_trimmed, batch)]) for trained in (model, ordinary)]
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)

    assert len(replay._passes[True, True]) == 1
    assert replay.reason is None
