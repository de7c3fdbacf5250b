"""Passes of a model that are not replayed: on a CPU, if they wait for the GPU, and if replay is impossible."""

from contextlib import nullcontext

import pytest
import torch
from torch_geometric.nn import GraphSAGE, SAGEConv

from pyg_direct import accelerate
from pyg_direct.errors import ArgumentError, ArgumentTypeError
from tests.nn.convolutions import assert_near
from tests.nn.replays import (
    find_gradients,
    make_graph,
    make_loader,
    make_model,
    make_pair,
    record_anywhere,
    run_trimmed,
)


@pytest.fixture(scope="module")
def graph():
    return make_graph()


@pytest.fixture
def batches(graph, device):
    return [*make_loader(graph, device), *make_loader(graph, device)]


class Pair(GraphSAGE):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs), None


class Pooled(GraphSAGE):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs).mean(0, keepdim=True).expand(7, -1)


@pytest.mark.parametrize(("kind", "reason"), [
    (Pair, "the model gives other results than one tensor"),
    (Pooled, "the model gives 7 rows"),
])  # fmt: skip
def test_what_cannot_be_cut_to_a_batch_is_told_and_ordinary(graph, device, batches, kind, reason):
    model = kind(graph.num_features, 32, 3, graph.num_classes).to(device)
    replay = accelerate(model, replay=True).replay

    for number, batch in enumerate(batches[:12]):
        told = pytest.warns(RuntimeWarning, match=f"are not replayed as CUDA graphs: {reason}")
        with told if number == 8 else nullcontext():
            run_trimmed(model, batch)

    assert (replay.replayed, replay.ordinary) == (0, 12)
    assert replay.reason.startswith(reason)
    assert reason in repr(replay)


class Waits(GraphSAGE):
    def forward(self, x, *args, **kwargs):
        return super().forward(x * float(x.abs().max()), *args, **kwargs)


@pytest.mark.gpu
def test_models_that_wait_for_the_gpu_are_ordinary(graph):
    model = Waits(graph.num_features, 32, 3, graph.num_classes).to("cuda")
    replay = accelerate(model, replay=True).replay
    loader = make_loader(graph, "cuda", drop_last=True)

    for number, batch in enumerate([*loader, *loader][:12]):
        told = pytest.warns(RuntimeWarning, match="are not replayed as CUDA graphs")
        with told if number == 8 else nullcontext():
            find_gradients(model, batch)

    assert (replay.replayed, replay.ordinary) == (0, 12)
    assert replay.reason


@pytest.mark.gpu
@pytest.mark.gpus
def test_passes_are_replayed_on_a_gpu_that_is_not_the_current_one(graph, monkeypatch):
    record_anywhere(torch.device("cuda:1"), monkeypatch)
    ordinary, model, replay = make_pair(make_model(graph, "cuda:1"))
    loader = make_loader(graph, "cuda:1")

    for batch in [*loader, *loader, *loader][:20]:
        assert_near(find_gradients(model, batch), find_gradients(ordinary, batch))

    assert replay.replayed > 0


def test_a_cpu_replays_nothing(graph):
    model = make_model(graph, "cpu")
    replay = accelerate(model, replay=True).replay
    for batch in [*make_loader(graph, "cpu")][:12]:
        find_gradients(model, batch)

    assert (replay.replayed, replay.ordinary, replay.reason) == (0, 12, None)


def test_a_norm_over_all_nodes_of_a_batch_is_told(graph, device, batches):
    model = make_model(graph, device, norm="batch_norm")
    replay = accelerate(model, replay=True).replay

    for number, batch in enumerate(batches[:12]):
        told = pytest.warns(RuntimeWarning, match=r"the model has a norm over all nodes, BatchNorm at 'norms\.0'")
        with told if number == 8 else nullcontext():
            run_trimmed(model, batch)

    assert replay.replayed == 0


def test_arguments_are_checked(graph):
    with pytest.raises(ArgumentTypeError, match=r"replay must be True, False, .* got 'always'"):
        accelerate(make_model(graph, "cpu"), replay="always")
    with pytest.raises(ArgumentError, match=r"one that holds convolutions to be replayed, .* got SAGEConv"):
        accelerate(SAGEConv(3, 3), replay=True)


def test_torchscript_takes_pygs_code():
    class Small(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    model = Small()
    accelerate(model, replay=True)

    scripted = torch.jit.script(model)

    assert torch.equal(scripted(torch.ones(2, 3)), model(torch.ones(2, 3)))
    assert model._replay.ordinary == 1


def test_what_is_refused_leaves_a_model_as_it_was():
    held = torch.nn.DataParallel(GraphSAGE(4, 4, 2))
    with pytest.raises(ArgumentError, match="the one that DataParallel holds to be replayed"):
        accelerate(held, replay=True)
    assert all("forward" not in part.__dict__ and "propagate" not in part.__dict__ for part in held.modules())
