"""T-GCN takes its gated steps by kernels where there is a GPU, with the values of torch's functions."""

import pytest
import torch

from pyg_direct.datasets.dynamic import synthetic_dtdg
from pyg_direct.dynamic import nn, stream
from pyg_direct.dynamic.nn import tgcn
from pyg_direct.ops.launch import runs_on_gpu

PERIODS = 4


@pytest.mark.parametrize("way", ["plain", "streamed", "periods"])
def test_steps_are_those_of_torch(device, monkeypatch, way):
    torch.manual_seed(2)
    signal = [snapshot.to(device) for snapshot in synthetic_dtdg(12, 40, 3, 0.2, 3, weighted=True)]
    for snapshot in signal if way == "periods" else ():
        snapshot.x = torch.stack([snapshot.x * (period + 1) for period in range(PERIODS)], 2)
    layer = (nn.A3TGCN(3, 5, PERIODS) if way == "periods" else nn.TGCN(3, 5)).to(device)
    steps, real = [], tgcn.step_gated
    monkeypatch.setattr(tgcn, "_FEW", {})
    monkeypatch.setattr(tgcn, "step_gated", lambda *given: steps.append(given) or real(*given))

    got = run(layer, stream(signal, device) if way == "streamed" else signal)

    assert len(steps) == len(signal) * runs_on_gpu(signal[0].x)
    monkeypatch.setattr(tgcn, "suits_gpu", lambda *given: False)
    for mine, expected in zip(got, run(layer, signal), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


def run(layer, signal):
    """The last state, and the gradients of all parameters."""
    layer.zero_grad()
    state = None
    for snapshot in signal:
        state = layer(snapshot.x, snapshot.edge_index, snapshot.edge_attr, state)
    state.square().sum().backward()
    return [state.detach(), *(parameter.grad for parameter in layer.parameters() if parameter.grad is not None)]
