"""Layers under autocast, with products of fewer bits than states and features."""

import pytest
import torch

from pyg_direct.dynamic import stream
from tests.dynamic.nn.test_parity import LAYERS, make_pair, make_signal_for, pytestmark as _marks, run_layer

pytestmark = _marks


@pytest.mark.parametrize("name", [name for name in LAYERS if LAYERS[name][1] in ("state", "two states")])
@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
def test_states_are_those_of_pygt(name, streamed):
    layer, reference, kind = make_pair(name)
    signal = make_signal_for(name, True)
    given = stream(signal, "cpu") if streamed else signal

    with torch.autocast("cpu", torch.bfloat16):
        got, expected = run_layer(layer, kind, given, name), run_layer(reference, kind, signal, name)
    sum(out.float().sum() for out in got).backward()

    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=0.05, atol=0.05)
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


@pytest.mark.parametrize("name", [name for name in LAYERS if name.startswith("Evolve")])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
def test_what_evolving_weights_convolve_is_of_the_dtype_of_pygts(real_device, name, weighted, streamed):
    layer, reference, kind = (part if isinstance(part, str) else part.to(real_device) for part in make_pair(name))
    signal = [snapshot.to(real_device) for snapshot in make_signal_for(name, weighted)]
    given = stream(signal, real_device) if streamed else signal

    with torch.autocast(real_device.type, torch.bfloat16):
        got, expected = run_layer(layer, kind, given, name), run_layer(reference, kind, signal, name)
    sum(out.float().sum() for out in got).backward()

    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=0.05, atol=0.05)
    assert layer.initial_weight.grad.isfinite().all()


@pytest.mark.parametrize("name", [name for name in LAYERS if name.startswith("Evolve")])
@pytest.mark.parametrize("weights", [None, torch.float32, torch.bfloat16], ids=["", "fp32", "bf16"])
@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
def test_weights_of_edges_tell_the_dtype_of_narrow_snapshots(name, weights, streamed):
    layer, reference, kind = (part if isinstance(part, str) else part.bfloat16() for part in make_pair(name))
    signal = make_signal_for(name, weights is not None)
    for snapshot in signal:
        snapshot.x = snapshot.x.bfloat16()
        snapshot.edge_attr = None if weights is None else snapshot.edge_attr.to(weights)
    given = stream(signal, "cpu") if streamed else signal

    got, expected = run_layer(layer, kind, given, name), run_layer(reference, kind, signal, name)

    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs)
