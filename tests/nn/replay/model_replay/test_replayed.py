"""Models whose passes are replayed as CUDA graphs: results, gradients and training of ordinary passes.

Without a GPU, recordings are lists of calls that are made again over the same memory.
"""

import copy
import gc
import pickle
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch_geometric.nn import GINEConv, GraphConv, GraphSAGE

from pyg_direct import accelerate
from tests.nn.convolutions import assert_near
from tests.nn.replays import (
    MODELS,
    find_gradients,
    find_loss,
    make_graph,
    make_loader,
    make_model,
    make_pair,
    record,
    run_trimmed,
    run_whole,
)


@pytest.fixture(scope="module")
def graph():
    return make_graph()


@pytest.fixture
def batches(graph, device):
    return [batch for _ in range(3) for batch in make_loader(graph, device, shuffle=True)][:24]


@pytest.mark.parametrize("run", [run_trimmed, run_whole])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.full
def test_gradients_are_those_of_ordinary_passes(graph, device, batches, name, run):
    ordinary, model, replay = make_pair(make_model(graph, device, name))

    for batch in batches:
        assert_near(find_gradients(model, batch, run), find_gradients(ordinary, batch, run))

    assert replay.reason is None
    assert replay.replayed >= 12
    assert replay.replayed + replay.ordinary == len(batches)


@pytest.mark.parametrize("run", [run_trimmed, run_whole])
def test_all_rows_are_those_of_ordinary_passes(graph, device, batches, run):
    ordinary, model, replay = make_pair(make_model(graph, device))

    for batch in batches:
        found, expected = run(model, batch), run(ordinary, batch)
        assert found.shape == expected.shape
        assert_near([found], [expected])
        # Of no pass that goes back are there traces.
        del found

    assert replay.replayed >= 12


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_loop_trains_as_before(graph, device, batches, momentum):
    ordinary, model, replay = make_pair(make_model(graph, device))
    losses = []
    for trained in (ordinary, model):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.05, momentum=momentum)
        losses.append([])
        for batch in batches:
            losses[-1].append(float(find_gradients(trained, batch)[0]))
            optimizer.step()

    assert replay.replayed >= 12
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-3, atol=1e-4)
    assert losses[1][-1] < losses[1][0]


@pytest.mark.parametrize("run", [run_trimmed, run_whole])
def test_padding_has_no_gradients_of_batches_before(graph, device, batches, run):
    ordinary, model, replay = make_pair(make_model(graph, device))
    fitting = []
    for batch in batches:
        before = replay.replayed
        find_gradients(model, batch, run)
        fitting += [batch] * (replay.replayed - before)
    small, *_, large = sorted(fitting, key=lambda batch: batch.num_nodes)
    before = replay.replayed

    for batch in (large, large, small, small, large, small):
        for trained in (model, ordinary):
            trained.zero_grad()
            run(trained, batch).square().sum().backward()
        assert_near([part.grad for part in model.parameters()], [part.grad for part in ordinary.parameters()])

    assert replay.replayed == before + 6


def test_gradients_of_several_batches_add_up(graph, device, batches):
    ordinary, model, replay = make_pair(make_model(graph, device))
    record(model, batches)
    before = replay.replayed
    for trained in (ordinary, model):
        trained.zero_grad()
        for batch in batches[12:20]:
            find_loss(trained, batch).backward()

    assert replay.replayed >= before + 6
    assert_near([part.grad for part in model.parameters()], [part.grad for part in ordinary.parameters()])


def test_a_pass_waits_for_none_that_may_still_go_back(graph, device, batches):
    ordinary, model, replay = make_pair(make_model(graph, device))
    record(model, batches)
    before = replay.replayed, replay.ordinary
    for trained in (ordinary, model):
        trained.zero_grad()
        losses = [find_loss(trained, batch) for batch in batches[12:15]]
        sum(losses).backward()

    assert (replay.replayed, replay.ordinary) == (before[0] + 1, before[1] + 2)
    assert_near([part.grad for part in model.parameters()], [part.grad for part in ordinary.parameters()])


def test_results_and_gradients_keep_their_memory(graph, device, batches):
    _, model, _ = make_pair(make_model(graph, device))
    record(model, batches)
    first = run_trimmed(model, batches[12])
    found = torch.autograd.grad(first.sum(), list(model.parameters()))
    kept = [part.detach().clone() for part in (first, *found)]

    for batch in batches[13:16]:
        find_gradients(model, batch)

    assert_near([first.detach(), *found], kept)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_pass_goes_back_twice(graph, device, batches, dropout):
    _, model, _ = make_pair(make_model(graph, device, dropout=dropout))
    record(model, batches)
    model.zero_grad()
    loss = find_loss(model, batches[12])
    loss.backward(retain_graph=True)
    once = [part.grad.clone() for part in model.parameters()]
    # Another pass comes in between.
    for batch in batches[13:15]:
        run_trimmed(model, batch)

    loss.backward()

    assert_near([part.grad for part in model.parameters()], [2 * part for part in once])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_gradients_of_gradients(graph, device, batches):
    ordinary, model, replay = make_pair(make_model(graph, device))
    record(model, batches)
    before = replay.replayed
    found = []
    for trained in (model, ordinary):
        trained.zero_grad()
        parts = torch.autograd.grad(find_loss(trained, batches[12]), list(trained.parameters()), create_graph=True)
        sum(part.square().sum() for part in parts).backward()
        found.append([part.grad for part in trained.parameters() if part.grad is not None])

    assert replay.replayed == before + 1
    assert_near(*found)


def test_parameters_that_change_between_are_told(graph, device, batches):
    ordinary, model, _ = make_pair(make_model(graph, device))
    record(model, batches)
    for trained, named in ((ordinary, "Tensor"), (model, "a parameter of shape")):
        loss = find_loss(trained, batches[12])
        with torch.no_grad():
            trained.convs[2].lin_l.weight.mul_(2)

        with pytest.raises(RuntimeError, match=f"modified by an inplace operation: .*{named}"):
            loss.backward()


def test_evaluation_is_ordinary(graph, device, batches):
    ordinary, model, replay = make_pair(make_model(graph, device, dropout=0.5))
    record(model, batches)
    before = replay.replayed, replay.ordinary
    assert before[0] > 0

    with torch.no_grad():
        run_trimmed(model, batches[12])
    for trained in (model, ordinary):
        trained.eval()
    assert_near([run_trimmed(model, batches[12])], [run_trimmed(ordinary, batches[12])])

    assert (replay.replayed, replay.ordinary) == before


def test_evaluation_is_replayed_where_that_is_left_to_us(graph, device, batches):
    ordinary, model, _ = make_pair(make_model(graph, device, dropout=0.5))
    replay = accelerate(model, replay="auto").replay
    for trained in (model, ordinary):
        trained.eval()
    with torch.no_grad():
        kept = []
        for batch in batches[:16]:
            kept.append((run_trimmed(model, batch), run_trimmed(ordinary, batch)))
        for found, expected in kept:
            assert_near([found], [expected])
            assert not found.requires_grad

    assert replay.replayed >= 6


def test_new_values_are_seen_and_new_memory_is_recorded_anew(graph, device, batches):
    ordinary, model, replay = make_pair(make_model(graph, device))
    record(model, batches)
    before = replay.ordinary

    other = make_model(graph, device).state_dict()
    for part in other.values():
        part.mul_(0.5)
    for trained in (model, ordinary):
        trained.load_state_dict(other)
    assert_near(find_gradients(model, batches[12]), find_gradients(ordinary, batches[12]))
    assert replay.ordinary == before

    with torch.no_grad():
        for trained in (model, ordinary):
            for part in trained.parameters():
                part.data = part.data * 0.5
    for batch in batches[:12]:
        assert_near(find_gradients(model, batch), find_gradients(ordinary, batch))
    assert replay.ordinary >= before + 8
    assert replay.replayed > 0


def test_frozen_parameters_get_no_gradient(graph, device, batches):
    ordinary, model, replay = make_pair(make_model(graph, device))
    for trained in (ordinary, model):
        for part in trained.convs[0].parameters():
            part.requires_grad_(False)
    for batch in batches[:16]:
        assert_near(find_gradients(model, batch), find_gradients(ordinary, batch))

    assert replay.replayed > 0
    assert all(part.grad is None for part in model.convs[0].parameters())


def test_where_hooks_look_on_passes_are_ordinary(graph, device, batches):
    _, model, replay = make_pair(make_model(graph, device))
    seen = []
    handle = model.convs[1].register_forward_hook(lambda *_: seen.append(1))
    for batch in batches[:12]:
        find_gradients(model, batch)
    assert (len(seen), replay.replayed) == (12, 0)

    handle.remove()
    record(model, batches)


def test_hooks_of_parameters_and_models_are_called_once_a_pass(graph, device, batches):
    ordinary, model, replay = make_pair(make_model(graph, device))
    seen = []
    for trained in (ordinary, model):
        trained.convs[0].lin_l.weight.register_hook(lambda gradient: 2 * gradient)
        trained.register_forward_hook(lambda *_: seen.append(1))
    for batch in batches[:16]:
        assert_near(find_gradients(model, batch), find_gradients(ordinary, batch))

    assert replay.replayed > 0
    assert len(seen) == 32


def test_losses_that_are_kept_change_nothing(graph, device, batches):
    ordinary, model, replay = make_pair(make_model(graph, device))
    losses = []
    for batch in batches[:16]:
        for trained in (model, ordinary):
            trained.zero_grad()
            losses.append(find_loss(trained, batch))
            losses[-1].backward()
        assert_near([part.grad for part in model.parameters()], [part.grad for part in ordinary.parameters()])

    assert replay.replayed > 0


class Remembers(GraphSAGE):
    """Its rows go through layers that keep lists of their parameters."""

    def __init__(self, *args):
        super().__init__(*args)
        self.memory = torch.nn.LSTM(self.out_channels, self.out_channels, batch_first=True)

    def forward(self, *args, **kwargs):
        return self.memory(super().forward(*args, **kwargs).unsqueeze(1))[0].squeeze(1)


def test_layers_with_lists_of_their_parameters(graph, device, batches, monkeypatch):
    torch.manual_seed(0)
    ordinary, model, replay = make_pair(Remembers(graph.num_features, 32, 3, graph.num_classes).to(device))
    # A copy has these apart, of which torch warns.
    ordinary.memory.flatten_parameters()
    # A program that moves parameters makes the recording useless.
    monkeypatch.setattr(torch.nn.LSTM, "flatten_parameters", lambda layer: pytest.fail("parameters were moved"))
    # With fewer bits, results would depend on how many rows there are.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    for batch in batches[:16]:
        found = find_gradients(model, batch)
        assert len(found) == 1 + len(list(model.parameters()))
        assert_near(found, find_gradients(ordinary, batch))

    assert (replay.replayed > 0) == (replay.reason is None)
    assert device.type == "cuda" or replay.replayed > 0


class Borrows(GraphSAGE):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs) * self.others[0]


def test_gradients_of_what_is_no_parameter_are_not_lost(graph, device, batches):
    model = Borrows(graph.num_features, 32, 3, graph.num_classes).to(device)
    model.others = [torch.ones((), device=device, requires_grad=True)]
    replay = accelerate(model, replay=True).replay
    for number, batch in enumerate(batches[:12]):
        told = pytest.warns(RuntimeWarning, match="asked for by what is no parameter of the model")
        with told if number == 8 else nullcontext():
            find_gradients(model, batch)
        assert model.others[0].grad is not None
        model.others[0].grad = None

    assert (replay.replayed, replay.ordinary) == (0, 12)
    assert all(type(part) is torch.nn.Parameter and part.grad is not None for part in model.parameters())


def test_rows_that_learn_are_ordinary(graph, device, batches):
    _, model, replay = make_pair(make_model(graph, device))
    for batch in batches[:12]:
        batch = copy.copy(batch)
        batch.x = batch.x.clone().requires_grad_()
        find_loss(model, batch).backward()
        assert batch.x.grad is not None

    assert (replay.replayed, replay.ordinary) == (0, 12)


class Weighted(torch.nn.Module):
    """A user's own: rows of edges, and of nodes that are looked up."""

    def __init__(self, num_nodes, num_classes):
        super().__init__()
        self.rows = torch.nn.Embedding(num_nodes, 16)
        self.first, self.second = GraphConv(16, 16), GINEConv(torch.nn.Linear(16, num_classes))

    def forward(self, n_id, edge_index, weight, attr, scale=1.0):
        x = self.first(self.rows(n_id), edge_index, weight).relu() * scale
        return self.second(x, edge_index, attr)


def test_rows_of_edges_and_ids_move_along(graph, device, batches):
    torch.manual_seed(0)
    ordinary, model, replay = make_pair(Weighted(graph.num_nodes, graph.num_classes).to(device))
    for number, batch in enumerate(batches):
        batch.weight = torch.rand(batch.num_edges, device=device)
        batch.attr = torch.randn(batch.num_edges, 16, device=device)
        scale = 0.5 if number < 12 else 0.25
        run = lambda model, batch, s=scale: model(batch.n_id, batch.edge_index, batch.weight, attr=batch.attr, scale=s)  # noqa: E731
        assert_near(find_gradients(model, batch, run), find_gradients(ordinary, batch, run))

    assert replay.reason is None
    # Eight of each scale come before.
    assert 4 <= replay.replayed <= len(batches) - 16


def test_autocast_is_that_of_the_loop(graph, device, batches):
    ordinary, model, replay = make_pair(make_model(graph, device))
    for batch in batches[:16]:
        found = []
        for trained in (model, ordinary):
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = find_loss(trained, batch)
            trained.zero_grad()
            loss.backward()
            found.append([loss.detach(), *(part.grad for part in trained.parameters())])
        for one, other in zip(*found, strict=True):
            assert one.dtype == other.dtype == torch.float32
            assert float((one - other).norm()) <= 2e-2 * float(other.norm()) + 1e-4

    assert replay.replayed > 0


def test_dropout_draws_anew(graph, device, batches):
    _, model, replay = make_pair(make_model(graph, device, dropout=0.5))
    record(model, batches)
    before = replay.replayed
    found = [run_trimmed(model, batches[12]).detach() for _ in range(3)]

    assert replay.replayed == before + 3
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


def test_settings_that_change_are_seen(graph, device, batches):
    _, model, replay = make_pair(make_model(graph, device, dropout=0.5))
    record(model, batches)
    before = replay.replayed
    assert before > 0

    model.dropout.p = 0.0
    ordinary = copy.deepcopy(model)
    accelerate(ordinary, replay=False)
    assert_near(find_gradients(model, batches[12]), find_gradients(ordinary, batches[12]))
    assert replay.replayed == before


def test_copies_and_undo(graph, device, batches):
    ordinary, model, replay = make_pair(make_model(graph, device))
    record(model, batches)

    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for other in (copied, pickled):
        assert other.state_dict().keys() == ordinary.state_dict().keys()
        for batch in batches[:12]:
            assert_near(find_gradients(other, batch), find_gradients(ordinary, batch))
    assert copied._replay.replayed > 0
    assert copied._replay is not replay

    again = accelerate(model, replay=True)
    assert again.replay is not replay
    again.undo()
    assert "forward" not in model.__dict__
    assert "_replay" not in model.__dict__
    plain = make_model(graph, device)
    assert vars(model).keys() == vars(plain).keys()
    assert accelerate(model, replay=False).replay is None


def test_memory_goes_with_the_model(graph, device, batches):
    model = make_model(graph, device)
    accelerate(model, replay=True)
    record(model, batches)
    died = []
    weakref.finalize(model._replay._passes[True, True][0].recording, died.append, 1)
    del model
    gc.collect()

    assert died == [1]
