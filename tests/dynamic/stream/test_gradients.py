"""Features and weights of a signal that ask for gradients get them."""

import pytest
import torch

from pyg_direct.dynamic import FrameTrainer, stream
from pyg_direct.dynamic.nn import TGCN
from pyg_direct.errors import ArgumentError
from tests.dynamic.stream.test_stream import CHANNELS, make_list


@pytest.mark.filterwarnings("ignore:edge_weight asks for gradients:UserWarning")
@pytest.mark.parametrize("keep", ["device", "host"])
@pytest.mark.parametrize("name", ["x", "edge_attr"])
def test_gradients_reach_the_tensors_of_the_list(device, keep, name):
    snapshots, layer = make_list(2), TGCN(CHANNELS, 4).to(device)
    for snapshot in snapshots:
        snapshot[name].requires_grad_()

    given = stream(snapshots, device, keep=keep)[1]
    layer(given.x, given.edge_index, given.edge_attr).sum().backward()

    mine, snapshots[1][name].grad = snapshots[1][name].grad, None
    plain = snapshots[1].clone().to(device)
    layer(plain.x, plain.edge_index, plain.edge_attr).sum().backward()
    torch.testing.assert_close(mine, snapshots[1][name].grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["x", "edge_attr"])
def test_frames_have_none_and_say_so(name):
    snapshots, layer = make_list(3), TGCN(CHANNELS, 1)
    snapshots[2][name].requires_grad_()

    with pytest.raises(ArgumentError, match=f"^{name} must not ask for gradients"):
        FrameTrainer(layer, snapshots, torch.optim.SGD(layer.parameters()), window=2, device="cpu")
