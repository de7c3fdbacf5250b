"""Messages of GINEConv, made and summed in one launch, beside the same in float64."""

import pytest
import torch

from pyg_direct.nn.conv import gine
from pyg_direct.nn.conv.gine import sum_messages
from pyg_direct.ops.aggregate import sum_rows as module

NODES, TARGETS = 30, 11


@pytest.fixture
def launches(monkeypatch):
    """Names of the kernels that ran."""
    made, run = [], module.run_gpu

    def count(kernel, *args, **kwargs):
        made.append(kernel.name)
        run(kernel, *args, **kwargs)

    monkeypatch.setattr(module, "run_gpu", count)
    return made


def make(device, dtype, index, width, most=15):
    """(rows, rows of edges, indptr, row, target): a target without edges, parallel edges, messages of both signs."""
    generator = torch.Generator().manual_seed(3)
    degrees = torch.randint(most + 1, (TARGETS,), generator=generator)
    degrees[0], degrees[3] = most, 0
    target = torch.arange(TARGETS).repeat_interleave(degrees)
    row = torch.randint(NODES, target.shape, generator=generator)
    row[1] = row[0]
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)])
    x, edge_rows = (torch.randn(n, width, generator=generator).to(dtype) for n in (NODES, len(row)))
    edge_rows[:2] = -x[row[:2]]
    return (x.to(device), edge_rows.to(device), *(part.to(device, index) for part in (indptr, row, target)))


def run(x, edge_rows, indptr, row, target, reduce, wants, **options):
    """Return (result, requested gradients)."""
    x, edge_rows = x.detach().requires_grad_("x" in wants), edge_rows.detach().requires_grad_("e" in wants)
    out = sum_messages(x, edge_rows, indptr, row, target, TARGETS, reduce=reduce, max_degree=15)
    leaves = [part for part in (x, edge_rows) if part.requires_grad]
    grad = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).to(out.dtype)
    return [out, *(torch.autograd.grad(out, leaves, grad, **options) if leaves else [])]


@pytest.mark.parametrize("wants", ["", "x", "e", "xe"])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 4), (torch.float32, 100), (torch.bfloat16, 8),
                                              (torch.float16, 64), (torch.float64, 6), (torch.float32, 3)],
                         ids=str)  # fmt: skip
@pytest.mark.parametrize("gathers", [False, True], ids=["atomics", "by source"])
def test_equals_float64(device, dtype, width, index, reduce, wants, gathers, launches, monkeypatch):
    monkeypatch.setattr(gine, "GATHERED_BYTES", 0 if gathers else 1 << 40)
    given = make(device, dtype, index, width)
    expected = run(given[0].double().cpu(), given[1].double().cpu(), *(p.cpu() for p in given[2:]), reduce, wants)

    got = run(*given, reduce, wants)

    rtol = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double().cpu(), other, rtol=rtol, atol=rtol)
    fused = str(device) != "cpu" and width * dtype.itemsize % 16 == 0 and dtype != torch.float64
    assert launches == (["sum_messages_gpu"] + ["pull_messages_gpu"] * bool(wants) if fused else [])


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_gradients_are_differentiated_again(device, reduce):
    x, edge_rows, *edges = make(device, torch.float32, torch.int64, 8)
    x.requires_grad_(), edge_rows.requires_grad_()

    def penalty(x, edge_rows):
        out = sum_messages(x, edge_rows, *edges, TARGETS, reduce=reduce, max_degree=15)
        grads = torch.autograd.grad(out.pow(2).sum(), [x, edge_rows], create_graph=True)
        return torch.autograd.grad(sum(grad.pow(2).sum() for grad in grads), [x, edge_rows])

    got = penalty(x, edge_rows)
    edges = [part.cpu() for part in edges]
    expected = penalty(*(part.detach().cpu().double().requires_grad_() for part in (x, edge_rows)))

    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one.cpu().double(), other, rtol=1e-4, atol=1e-4)


def test_rows_may_be_written_once_they_are_summed(device):
    x, edge_rows, *edges = make(device, torch.float32, torch.int64, 8)
    rows = x.clone().requires_grad_()
    taken = rows * 1
    out = sum_messages(taken, edge_rows, *edges, TARGETS, reduce="sum", max_degree=15)
    expected = torch.autograd.grad(out.sum(), rows, retain_graph=True)

    taken += 1
    edge_rows += 1

    assert torch.equal(*(part.cpu() for part in (torch.autograd.grad(out.sum(), rows)[0], expected[0])))


def test_deterministic_gradients_are_equal(device):
    given = make(device, torch.float32, torch.int64, 64)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (run(*given, "sum", "xe") for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_message_that_is_no_number_stays_so(device):
    x, edge_rows, *edges = make(device, torch.float32, torch.int64, 4)
    edge_rows[5, 1] = float("nan")
    target = int(edges[2][5])

    out = sum_messages(x, edge_rows, *edges, TARGETS, reduce="sum", max_degree=15)

    assert out.isnan().nonzero().tolist() == [[target, 1]]


def test_gradients_come_in_batches_and_from_the_middle_of_a_tensor(device):
    x, edge_rows, *edges = make(device, torch.float32, torch.int64, 8)
    x.requires_grad_(), edge_rows.requires_grad_()
    out = sum_messages(x, edge_rows, *edges, TARGETS, reduce="sum", max_degree=15)
    # Rows that do not begin at a multiple of 16 bytes.
    grads = torch.randn(3 * out.numel() + 1, device=device)[1:].view(3, *out.shape)

    each = [torch.autograd.grad(out, [x, edge_rows], grad, retain_graph=True) for grad in grads]
    got = torch.autograd.grad(out, [x, edge_rows], grads, is_grads_batched=True, retain_graph=True)
    expected = [torch.autograd.grad(out, [x, edge_rows], grad.clone(), retain_graph=True) for grad in grads]

    for number, part in enumerate(got):
        torch.testing.assert_close(part, torch.stack([one[number] for one in expected]), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(torch.stack([one[number] for one in each]), part, rtol=1e-5, atol=1e-5)


def test_an_infinite_gradient_stops_at_a_message_that_is_cut_off(device):
    x, edge_rows, *edges = make(device, torch.float32, torch.int64, 4)
    edge_rows -= 100
    x.requires_grad_()

    out = sum_messages(x, edge_rows, *edges, TARGETS, reduce="sum", max_degree=15)
    (grad,) = torch.autograd.grad(out, x, torch.full_like(out, float("inf")), create_graph=True)

    assert torch.equal(grad, torch.zeros_like(x))
