"""Accelerated models are saved, copied, scripted, compiled, transformed and explained as before."""

import copy
import io
import pickle

import pytest
import torch
from torch.autograd import forward_ad
from torch_geometric.nn import GAT, GCN, GIN, GraphSAGE, SAGEConv

from pyg_direct import accelerate
from tests.nn.convolutions import CONVOLUTIONS, EDGES, OUT, WIDTH, Batch, assert_near, run


@pytest.mark.parametrize("name", ["sage", "gcn", "gat"])
def test_models_are_saved_and_copied_as_before(name, calls):
    batch, conv = Batch(loops=False), CONVOLUTIONS[name]()
    x, keys = torch.randn(batch.num_nodes, WIDTH), list(conv.state_dict())
    accelerate(conv)
    expected = conv(x, batch.edge_index)
    file = io.BytesIO()

    torch.save(conv, file)
    file.seek(0)
    loaded, copied = torch.load(file, weights_only=False), copy.deepcopy(conv)
    calls.clear()
    with torch.no_grad():
        copied.get_parameter(keys[0]).add_(1)

    assert list(conv.state_dict()) == keys
    assert_near([loaded(x, batch.edge_index)], [expected])
    assert calls == []
    assert not torch.allclose(copied(x, batch.edge_index), expected)
    assert_near([conv(x, batch.edge_index)], [expected])
    assert len(calls) >= 2


@pytest.mark.parametrize("name", ["sage", "gcn", "gat"])
def test_models_that_were_saved_are_accelerated_again(name, calls):
    batch, conv = Batch(loops=False), CONVOLUTIONS[name]()
    accelerate(conv)
    loaded = pickle.loads(pickle.dumps(conv))

    names = accelerate(loaded).convolutions

    assert names == accelerate(conv).convolutions
    loaded(torch.randn(batch.num_nodes, WIDTH), batch.edge_index)
    assert calls


@pytest.mark.parametrize("name", ["sage", "sage max", "graph mean", "gcn", "gin", "gat", "gatv2"])
def test_gradients_come_in_batches(name, calls):
    batch, conv = Batch(loops=False), CONVOLUTIONS[name]()
    x = torch.randn(batch.num_nodes, WIDTH, requires_grad=True)
    accelerate(conv)
    out = conv(x, batch.edge_index)
    assert calls
    grads = torch.randn(3, *out.shape)
    inputs = [x, *conv.parameters()]
    expected = [torch.autograd.grad(out, inputs, grad, retain_graph=True, allow_unused=True) for grad in grads]

    got = torch.autograd.grad(out, inputs, grads, is_grads_batched=True, allow_unused=True)

    for part, *parts in zip(got, *expected, strict=True):
        assert (part is None) == (parts[0] is None)
        if part is not None:
            assert_near([part], [torch.stack(parts)])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["sage", "gcn"])
def test_models_are_scripted_as_before(name, calls):
    batch, conv = Batch(), CONVOLUTIONS[name]()
    x = torch.randn(batch.num_nodes, WIDTH)
    expected = conv(x, batch.edge_index)
    accelerate(conv)

    scripted = torch.jit.script(conv)

    assert_near([scripted(x, batch.edge_index)], [expected])
    assert calls == []


# PyG's code warns of values that it reads in Python.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [GraphSAGE, GIN, GCN, GAT])
def test_models_are_traced_as_before(kind, calls):
    batch, model = Batch(), kind(WIDTH, 16, num_layers=2, out_channels=OUT).eval()
    x = torch.randn(batch.num_nodes, WIDTH)
    expected = model(x, batch.edge_index)
    accelerate(model)

    traced = torch.jit.trace(model, (x, batch.edge_index))

    assert_near([traced(x, batch.edge_index)], [expected])
    assert calls == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["sage", "gcn"])
def test_compiled_models_take_the_code_of_pyg(name, calls):
    batch, conv = Batch(), CONVOLUTIONS[name]()
    x = torch.randn(batch.num_nodes, WIDTH)
    expected = run(conv, x, batch.edge_index)
    accelerate(conv)

    got = run(torch.compile(conv, backend="aot_eager"), x, batch.edge_index)

    assert_near(got, expected)
    assert calls == []


def test_transformed_functions_take_the_code_of_pyg(calls):
    batch, conv = Batch(), SAGEConv(WIDTH, OUT)
    x, parameters = torch.randn(batch.num_nodes, WIDTH), dict(conv.named_parameters())

    def compute(values):
        return torch.func.functional_call(conv, values, (x, batch.edge_index)).square().sum()

    expected = torch.func.grad(compute)(parameters)
    accelerate(conv)
    got = torch.func.grad(compute)(parameters)

    assert all(torch.equal(got[name], expected[name]) for name in parameters)
    assert calls == []


@pytest.mark.parametrize("name", ["sage", "gcn", "gat", "gin"])
def test_derivatives_on_the_way_forward_take_the_code_of_pyg(name, calls):
    batch, conv = Batch(loops=False), CONVOLUTIONS[name]()
    x = torch.randn(batch.num_nodes, WIDTH)

    def derive():
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(conv(forward_ad.make_dual(x, torch.ones_like(x)), batch.edge_index)).tangent

    expected = derive()
    accelerate(conv)
    got = derive()

    assert torch.equal(got, expected)
    assert calls == []


def test_explained_models_take_the_code_of_pyg_until_accelerated_again(calls):
    batch, conv = Batch(), SAGEConv(WIDTH, OUT)
    x = torch.randn(batch.num_nodes, WIDTH)
    accelerate(conv)

    conv.explain = True
    conv._edge_mask, conv._apply_sigmoid = torch.zeros(sum(EDGES)), False
    masked = conv(x, batch.edge_index)
    conv.explain = None

    assert_near([masked], [conv.lin_l(torch.zeros_like(x)) + conv.lin_r(x)])
    assert calls == []
    assert accelerate(conv).convolutions == {"": "SAGEConv"}
    conv(x, batch.edge_index)
    assert calls == ["mean"]


@pytest.mark.parametrize("name", ["sage", "gcn", "gat", "gin"])
def test_hooks_of_a_layer_see_what_they_saw(name, calls):
    batch, conv = Batch(loops=False), CONVOLUTIONS[name]()
    x, seen = torch.randn(batch.num_nodes, WIDTH), []
    conv.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    conv.register_forward_hook(lambda module, args, out: seen.append(out))
    conv.register_full_backward_hook(lambda module, grad_in, grad_out: seen.append(grad_out[0]))

    for _ in range(2):
        conv(x.clone().requires_grad_(), batch.edge_index).square().sum().backward()
        accelerate(conv)

    assert_near(seen[3:], seen[:3])
    assert len(calls) > 0
