"""Gradients of layers over a stream and in frames come in batches."""

import pytest
import torch

from pyg_direct.dynamic import stream
from tests.dynamic.nn.recurrent_step.test_double_backward import assert_near
from tests.frames import MODELS, make_signal, make_trainer


@pytest.mark.parametrize("frames", [False, True], ids=["alone", "in a frame"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_come_in_batches(name, frames):
    outs, parameters = run_steps(name, frames)
    grads = [torch.randn(3, *out.shape) for out in outs]
    expected = pull_one_by_one(outs, parameters, grads)

    got = torch.autograd.grad(outs, parameters, grads, is_grads_batched=True, allow_unused=True)

    for mine, other in zip(got, expected, strict=True):
        assert (mine is None) == (other is None)
        if other is not None:
            assert_near(mine, other)


@pytest.mark.parametrize("frames", [False, True], ids=["alone", "in a frame"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_may_be_mapped(name, frames):
    outs, parameters = run_steps(name, frames)
    grads = [torch.randn(3, *out.shape) for out in outs]
    expected = pull_one_by_one(outs, parameters, grads)

    got = map_gradients(outs, parameters, grads)

    for mine, other in zip(got, expected, strict=True):
        assert_near(mine, torch.zeros_like(mine) if other is None else other)


def run_steps(name, frames):
    """Return a model's results for the first snapshots of a stream or of a frame, and its parameters."""
    given = stream(make_signal(name), "cpu")
    trainer = make_trainer(name, given)
    model, state, outs = trainer.model, None, []
    for snapshot in trainer._frame.get_snapshots() if frames else given[:3]:
        out = model(snapshot.x, snapshot.edge_index, snapshot.edge_attr, state)
        out, state = out if model.keeps_state else (out, None)
        outs.append(out)
    return outs, list(model.parameters())


def pull_one_by_one(outs, parameters, grads):
    """Return gradients of parameters, for each batch one after the other; None if there are none."""
    each = [
        torch.autograd.grad(outs, parameters, one, retain_graph=True, allow_unused=True)
        for one in zip(*grads, strict=True)
    ]
    return [None if parts[0] is None else torch.stack(parts) for parts in zip(*each, strict=True)]


def map_gradients(outs, parameters, grads):
    """Do so by `torch.func.vmap`; zeros if there are none."""

    def pull(*one):
        return torch.autograd.grad(outs, parameters, one, allow_unused=True, materialize_grads=True)

    return torch.func.vmap(pull)(*grads)
