"""Streams are made, and evaluated on, in `torch.inference_mode`, and trained on afterwards."""

import pytest
import torch
from torch_geometric.nn import ChebConv, GCNConv

from pyg_direct.dynamic import accelerate, stream
from pyg_direct.dynamic.nn import DCRNN, GCLSTM, MPNNLSTM, TGCN, EvolveGCNO, GConvGRU
from tests.dynamic.stream.test_stream import CHANNELS, NODES, make_list

LAYERS = {
    "TGCN": lambda: TGCN(CHANNELS, 4),
    "GConvGRU": lambda: GConvGRU(CHANNELS, 4, 3),
    "GCLSTM": lambda: GCLSTM(CHANNELS, 4, 2),
    "DCRNN": lambda: DCRNN(CHANNELS, 4, 3),
    "EvolveGCNO": lambda: EvolveGCNO(CHANNELS),
    "MPNNLSTM": lambda: MPNNLSTM(CHANNELS, 4, NODES, 1, 0.0),
    "GCNConv": lambda: GCNConv(CHANNELS, 4),
    "ChebConv": lambda: ChebConv(CHANNELS, 4, 4),
}


def run(layer, snapshots):
    """Results and gradients, snapshot by snapshot."""
    found = []
    for snapshot in snapshots:
        if hasattr(layer, "reinitialize_weight"):
            layer.reinitialize_weight()
        out = layer(snapshot.x, snapshot.edge_index, snapshot.edge_attr)
        out = out[0] if isinstance(out, tuple) else out
        found.append(out)
        if out.requires_grad:
            found += torch.autograd.grad(out.square().sum(), list(layer.parameters()), allow_unused=True)
    return [part for part in found if part is not None]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("keep", ["device", "host"])
@pytest.mark.parametrize("is_made_there", [False, True], ids=["made before", "made there"])
def test_an_evaluated_stream_is_trained_on(name, keep, is_made_there):
    # DCRNN takes each edge once.
    snapshots, layer = [snapshot.coalesce() for snapshot in make_list(4)], LAYERS[name]()
    expected = run(layer, snapshots)
    accelerate(layer)
    given = None if is_made_there else stream(snapshots, "cpu", keep=keep)

    with torch.inference_mode():
        given = stream(snapshots, "cpu", keep=keep) if given is None else given
        evaluated = run(layer, given)
    trained = run(layer, given)

    assert len(evaluated) == 4
    for got, other in zip(trained, expected, strict=True):
        torch.testing.assert_close(got, other, rtol=1e-3, atol=1e-4, equal_nan=True)
