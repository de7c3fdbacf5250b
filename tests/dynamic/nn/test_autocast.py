"""Layers under autocast, where products are of fewer bits than states and features."""

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
