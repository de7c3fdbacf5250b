"""Adam and AdamW of programs that are not edited: fused steps on a GPU, and steps by few calls of Python."""

import copy

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import pyg_direct
from pyg_direct.noedit import optimizers


def learn(optimizer, weight, scaler=None):
    x = torch.linspace(-1, 1, 30, device=weight.device).view(10, 3)
    for _ in range(20):
        optimizer.zero_grad()
        loss = (x @ weight).square().sum() + weight.abs().sum()
        (loss if scaler is None else scaler.scale(loss)).backward()
        optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
    return weight.detach()


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.usefixtures("_installed")
def test_adam_takes_fused_steps_with_equal_results(real_device, monkeypatch, kind, scaled):
    found = []
    for fuses in (False, True):
        monkeypatch.setattr(optimizers, "_may_fuse", lambda parameter, fuses=fuses: fuses)
        weight = torch.nn.Parameter(torch.ones(3, 2, device=real_device))
        optimizer = kind([weight], lr=0.01, weight_decay=0.1)
        assert optimizer.param_groups[0]["fused"] is (True if fuses else None)
        scaler = torch.amp.GradScaler(real_device.type, init_scale=8.0) if scaled else None
        found.append(learn(optimizer, weight, scaler))

    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


class Own(torch.optim.Adam):
    pass


@pytest.mark.usefixtures("_installed")
def test_steps_that_a_program_chose_are_not_fused(monkeypatch):
    weight = torch.nn.Parameter(torch.ones(3, 2))
    assert torch.optim.Adam([weight]).defaults["fused"] is None
    assert torch.optim.Adam([weight]).param_groups[0]["fused"] is None

    monkeypatch.setattr(optimizers, "_may_fuse", lambda parameter: True)

    assert torch.optim.Adam([weight], foreach=False).param_groups[0]["fused"] is None
    assert torch.optim.Adam([weight], fused=False).param_groups[0]["fused"] is False
    assert torch.optim.Adam([weight], lr=torch.tensor(0.1)).param_groups[0]["fused"] is None
    assert Own([weight]).param_groups[0]["fused"] is None
    plain = torch.optim.Adam([weight])
    saved = plain.state_dict()
    pyg_direct.uninstall()
    other = torch.optim.Adam([weight])
    assert other.param_groups[0]["fused"] is None
    # A checkpoint needs no package of ours.
    other.load_state_dict(saved)
    assert not torch.equal(weight.detach().clone(), learn(other, weight))


@pytest.mark.gpu
@pytest.mark.usefixtures("_installed")
def test_adam_is_fused_on_a_gpu():
    weight, moved = (torch.nn.Parameter(torch.ones(3, 2, device=device)) for device in ("cuda", "cpu"))

    assert torch.optim.Adam([weight]).param_groups[0]["fused"] is True
    assert torch.optim.Adam([weight, moved]).param_groups[0]["fused"] is None


# torch 2.7 and later.
IS_FAST = "decoupled_weight_decay" in torch.optim.Adam([torch.zeros(1)]).param_groups[0]
KINDS = pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])


def make_weights(device):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in ((3, 2), (5,), (), (4, 4))]


def train(optimizer, weights, steps=6):
    """Train all weights but the last, which has no gradient in every other step."""
    for number in range(steps):
        optimizer.zero_grad()
        used = weights[: len(weights) - number % 2]
        sum((weight * (1 + number)).square().sum() + weight.sum() for weight in used).backward()
        optimizer.step()
    return [weight.detach().clone() for weight in weights]


def count_fast(monkeypatch):
    made, plain = [], optimizers._step_groups
    monkeypatch.setattr(optimizers, "_step_groups", lambda *args: (made.append(1), plain(*args)))
    return made


@KINDS
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"amsgrad": True}, {"maximize": True}], ids=str)
def test_steps_are_those_of_torch(real_device, monkeypatch, kind, options):
    weights = make_weights(real_device)
    others = copy.deepcopy(weights)
    expected = train(kind(weights, lr=0.05, fused=True, **options), weights)
    pyg_direct.install(device="cpu")
    made = count_fast(monkeypatch)
    try:
        optimizer = kind(others, lr=0.05, fused=True, **options)
        found = train(optimizer, others)
    finally:
        pyg_direct.uninstall()

    assert len(made) == 6 * IS_FAST
    assert all(map(torch.equal, found, expected))
    assert float(optimizer.state[others[-1]]["step"]) == 3


@KINDS
@pytest.mark.usefixtures("_installed")
def test_groups_schedulers_and_checkpoints_are_followed(real_device, monkeypatch, kind):
    made, runs = count_fast(monkeypatch), []
    for is_plain in (False, True):
        weights = make_weights(real_device)
        optimizer = kind(weights[:2], lr=0.05, fused=True)
        if is_plain:
            optimizer.register_step_pre_hook(lambda *args: None)
        train(optimizer, weights[:2])
        optimizer.add_param_group({"params": weights[2:], "lr": 0.2, "fused": True})
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        train(optimizer, weights)
        scheduler.step()
        again = kind(weights[:2], lr=1.0, fused=True)
        again.add_param_group({"params": weights[2:]})
        again.load_state_dict(optimizer.state_dict())
        if is_plain:
            again.register_step_pre_hook(lambda *args: None)
        runs.append(train(again, weights))
        assert again.param_groups[1]["lr"] == 0.1

    assert len(made) == 3 * 6 * IS_FAST
    assert all(map(torch.equal, *runs))


@KINDS
@pytest.mark.parametrize("case", ["pre", "post", "global", "closure", "profiler", "foreach", "tensor"])
@pytest.mark.usefixtures("_installed")
def test_other_steps_are_torchs_own(monkeypatch, kind, case):
    made, calls = count_fast(monkeypatch), []
    weights = make_weights("cpu")
    options = {"fused": True, "lr": 0.05}
    if case == "foreach":
        options = {"foreach": True, "lr": 0.05}
    elif case == "tensor":
        options["lr"] = torch.tensor(0.05)
    optimizer = kind(weights, **options)
    handle = None
    if case in ("pre", "post"):
        getattr(optimizer, f"register_step_{case}_hook")(lambda *args: calls.append(case))
    elif case == "global":
        handle = register_optimizer_step_post_hook(lambda *args: calls.append(case))
    before = [weight.detach().clone() for weight in weights]
    sum(weight.sum() for weight in weights).backward()
    try:
        if case == "profiler":
            with torch.profiler.profile() as profile:
                optimizer.step()
                optimizer.zero_grad()
            names = {event.key for event in profile.key_averages()}
            assert {f"Optimizer.step#{kind.__name__}.step", f"Optimizer.zero_grad#{kind.__name__}.zero_grad"} <= names
        elif case == "closure":
            assert optimizer.step(lambda: calls.append(case) or 3.0) == 3.0
        else:
            optimizer.step()
    finally:
        if handle is not None:
            handle.remove()

    assert made == []
    assert calls == ([case] if case in ("pre", "post", "global", "closure") else [])
    assert not any(map(torch.equal, before, weights))


@pytest.mark.usefixtures("_installed")
def test_hooks_of_steps_are_called_after_all_is_undone():
    weights, calls = make_weights("cpu"), []
    optimizer = torch.optim.Adam(weights, fused=True)
    pyg_direct.uninstall()
    optimizer.register_step_post_hook(lambda *args: calls.append(1))

    train(optimizer, weights, 2)

    assert calls == [1, 1]
    assert torch.optim.Adam.step.hooked


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, Own])
@pytest.mark.usefixtures("_installed")
def test_gradients_are_dropped_or_set_to_zero(kind):
    weights = make_weights("cpu")
    optimizer = kind(weights, lr=0.1)
    for set_to_none in (True, False):
        sum(weight.sum() for weight in weights).backward()
        optimizer.zero_grad(set_to_none=set_to_none)
        assert all(weight.grad is None if set_to_none else not weight.grad.any() for weight in weights)
