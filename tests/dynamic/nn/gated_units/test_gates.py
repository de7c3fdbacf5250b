"""Only the steps of a sequence share folded weights."""

import copy
import pickle

import pytest
import torch

from pyg_direct.dynamic.nn import TGCN, gated_units
from pyg_direct.dynamic.nn.gated_units import SharedGates
from pyg_direct.ops.run_kernel import runs_on_gpu
from pyg_direct.ops.snapshots.run_recurrent_cells import fold_by_torch


@pytest.fixture
def layer(device, monkeypatch):
    """Make a layer whose folding is torch's if there are no kernels."""
    if not runs_on_gpu(torch.empty(0, device=device)):
        monkeypatch.setattr(gated_units, "fold_gates", fold_on_cpu)
    return TGCN(3, 5).to(device)


def fold_on_cpu(parameters, is_spent):
    weights = fold_by_torch(parameters)
    if weights.requires_grad:
        weights.register_hook(lambda grad: is_spent.__setitem__(0, True))
    return weights


def begin(layer):
    """Return the weights shared by a first step, and the state that it gave."""
    shared, state = SharedGates(), torch.zeros(2, 5, device=layer.linear_z.weight.device)
    folded = shared.fold(state, layer._list_parameters())
    after = torch.ones_like(state)
    shared.keep(after, folded)
    return shared, folded, after


def test_a_step_that_begins_with_the_last_state_shares(layer):
    shared, folded, state = begin(layer)

    again = shared.fold(state, layer._list_parameters())

    assert again is folded
    torch.testing.assert_close(again.weights, fold_by_torch(layer._list_parameters()))


def test_a_step_that_begins_with_another_state_does_not(layer):
    shared, folded, state = begin(layer)

    assert shared.fold(state.clone(), layer._list_parameters()) is not folded


def spend(layer, folded):
    folded.weights.sum().backward()


def step(layer, folded):
    with torch.no_grad():
        layer.linear_r.bias += 1


def freeze(layer, folded):
    layer.conv_z.lin.weight.requires_grad_(False)


def put_another(layer, folded):
    layer.conv_h.bias = torch.nn.Parameter(layer.conv_h.bias.detach().clone())


@pytest.mark.parametrize("change", [spend, step, freeze, put_another])
def test_what_changed_is_folded_anew(layer, change):
    shared, folded, state = begin(layer)

    change(layer, folded)

    again = shared.fold(state, layer._list_parameters())
    assert again is not folded
    torch.testing.assert_close(again.weights, fold_by_torch(layer._list_parameters()))


@pytest.mark.gpu
def test_what_is_captured_is_folded_anew(monkeypatch):
    layer = TGCN(3, 5).cuda()
    shared, folded, state = begin(layer)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    assert shared.fold(state, layer._list_parameters()) is not folded


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_shared_without_gradients(layer, mode):
    shared, folded, state = begin(layer)

    with mode():
        first = shared.fold(state, layer._list_parameters())
        assert first is not folded
        shared.keep(state, first)
        assert shared.fold(state, layer._list_parameters()) is not first
    last = shared.fold(state, layer._list_parameters())

    assert last is not first
    assert last.weights.requires_grad


def test_a_layer_of_inference_tensors_is_folded_each_time(device, layer):
    with torch.inference_mode():
        made = TGCN(3, 5).to(device)
        inside = begin(made)[1]
    assert made.linear_z.weight.is_inference()

    with torch.no_grad():
        shared, folded, state = begin(made)
        assert shared.fold(state, made._list_parameters()) is not folded

    torch.testing.assert_close(folded.weights, inside.weights.clone())


def test_copies_of_a_layer_share_nothing(layer):
    layer._shared, folded, state = begin(layer)

    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        again = copied._shared.fold(state, copied._list_parameters())

        assert again is not folded
        again.weights.sum().backward()
        assert copied.linear_z.weight.grad is not None
        assert layer.linear_z.weight.grad is None


def test_no_state_is_kept_for_it(layer):
    shared, folded, state = begin(layer)

    del state

    assert shared.fold(torch.ones(2, 5), layer._list_parameters()) is not folded
