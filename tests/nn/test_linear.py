"""Products of rows with matrices: torch's results and gradients, also second gradients."""

import pytest
import torch
import torch.nn.functional as F

from pyg_direct.nn import linear
from pyg_direct.nn.linear import (
    Product,
    add_to_first,
    add_up,
    multiply,
    multiply_each,
    multiply_ends,
    multiply_exactly,
    multiply_heads,
    multiply_into,
    multiply_tall,
    multiply_tall_halves,
    multiply_widely,
    split_in_two,
)
from pyg_direct.ops.run_kernel import runs_on_gpu
from tests.nn.convolutions import assert_near


def make_parts(device, dtype, has_own, count=70):
    shapes = [(count, 6), (5, 6), (5,), *([(count, 4), (5, 4)] if has_own else [])]
    return [torch.randn(shape, dtype=dtype).to(device).requires_grad_() for shape in shapes]


def expect(rows, weight, bias, own=None, own_weight=None):
    out = F.linear(rows, weight, bias)
    return out if own is None else out + F.linear(own, own_weight)


@pytest.mark.parametrize("has_own", [False, True])
@pytest.mark.parametrize("count", [70, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_torch(device, has_own, count, dtype):
    parts = make_parts(device, dtype, has_own, count)
    grad = torch.randn(count, 5, dtype=dtype).to(device)
    expected = expect(*parts)

    got = multiply(*parts)

    assert_near([got, *torch.autograd.grad(got, parts, grad)], [expected, *torch.autograd.grad(expected, parts, grad)])
    assert ("Products" in type(got.grad_fn).__name__) == runs_on_gpu(got)


def test_gradients_are_differentiated_again(device):
    parts = make_parts(device, torch.float64, True)

    assert torch.autograd.gradgradcheck(multiply, parts)


def test_only_wanted_gradients_are_computed(device):
    rows, weight, bias, own, own_weight = make_parts(device, torch.float32, True)
    multiply(rows.detach(), weight, bias, own.detach(), own_weight.detach()).sum().backward()

    assert all(part.grad is None for part in (rows, own, own_weight))
    assert_near([bias.grad], [torch.full((5,), 70.0, device=device)])


def test_other_dtypes_and_no_bias_are_left_to_torch(device):
    rows, weight, bias = make_parts(device, torch.float32, False)

    for got in (multiply(rows, weight, None), multiply(rows.bfloat16(), weight.bfloat16(), bias.bfloat16())):
        assert "Products" not in type(got.grad_fn).__name__


def multiply_some(rows, *parts):
    """Return products of all rows, of none, and of the first 4 and 9 rows."""
    first, second, third, bias, other = parts
    return multiply_each(rows, [Product(first, bias, 4), Product(second), Product(first, None, 0),
                                Product(third, other, 9)])  # fmt: skip


def make_some(device, dtype):
    shapes = [(12, 6), (5, 6), (3, 6), (2, 6), (5,), (2,)]
    return [torch.randn(shape, dtype=dtype).to(device).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("left_out", [None, 0, 1])
def test_products_of_first_rows_equal_torch(device, left_out):
    rows, first, second, third, bias, other = parts = make_some(device, torch.float64)
    expected = [F.linear(rows[:4], first, bias), F.linear(rows, second), F.linear(rows[:0], first),
                F.linear(rows[:9], third, other)]  # fmt: skip

    got = multiply_some(*parts)

    assert_near(got, expected)
    # A result that nobody reads has no gradient.
    totals = [sum(out.square().sum() for i, out in enumerate(outs) if i != left_out) for outs in (got, expected)]
    found = [torch.autograd.grad(total, parts, allow_unused=True) for total in totals]
    for one, other in zip(*found, strict=True):
        assert_near([torch.zeros(()) if one is None else one], [torch.zeros(()) if other is None else other])


def test_gradients_of_several_products_are_differentiated_again(device):
    parts = make_some(device, torch.float64)

    assert torch.autograd.gradgradcheck(multiply_some, parts)


def test_rows_alone_get_gradients_without_sums_for_biases(device, monkeypatch):
    parts, summed, plain = make_some(device, torch.float32), [], linear.add_up
    monkeypatch.setattr(linear, "add_up", lambda grad: (summed.append(1), plain(grad))[1])
    for outs in (multiply_some(*parts), [multiply(parts[0], parts[1] * 1, parts[4] * 1)]):
        total = sum(out.sum() for out in outs)
        torch.autograd.grad(total, parts[0], retain_graph=True)
        assert not summed

        total.backward()

        assert len(summed) >= runs_on_gpu(total)
        summed.clear()


def test_several_products_have_the_dtype_of_autocast(device):
    rows, weight, *_ = make_some(device, torch.float32)

    with torch.autocast(device.type, torch.bfloat16):
        (out,) = multiply_each(rows, [Product(weight)])

    assert out.dtype == torch.bfloat16


def test_ends_may_be_one_tensor_or_two(device):
    rows, first, second, *_ = make_some(device, torch.float64)
    expected = [rows @ first.t(), rows[:4] @ second.t()]

    for targets in (rows, rows[:4]):
        assert_near(multiply_ends(rows, targets, [Product(first)], [Product(second, None, 4)]), expected)


def test_rows_are_added_to_the_first_in_their_memory(device):
    rows, first = torch.randn(5, 3, device=device).requires_grad_(), torch.randn(2, 3, device=device).requires_grad_()
    expected = rows + F.pad(first, (0, 0, 0, 3))
    made = rows * 1

    got = add_to_first(made, first)

    assert got.data_ptr() == made.data_ptr()
    assert_near([got], [expected])
    assert_near(torch.autograd.grad(got.square().sum(), [rows, first]),
                torch.autograd.grad(expected.square().sum(), [rows, first]))  # fmt: skip
    assert add_to_first((rows * 1).bfloat16(), first).dtype == torch.float32


@pytest.mark.gpu
def test_sums_of_growing_gradients_on_two_streams_and_in_a_graph():
    side = torch.cuda.Stream()
    for count in (3, 700, 64, 0, 5000):
        grad = torch.randn(count, 7, device="cuda")
        expected = grad.sum(0)
        assert_near([add_up(grad)], [expected])
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            got = add_up(grad)
        torch.cuda.current_stream().wait_stream(side)
        assert_near([got], [expected])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = add_up(grad)
    # Larger ones take the place of those before.
    add_up(torch.ones(9000, 7, device="cuda"))
    graph.replay()

    assert_near([captured], [expected])


@pytest.mark.gpu
def test_sums_in_inference_mode_serve_training():
    linear._ONES.clear()
    with torch.inference_mode():
        add_up(torch.ones(10, 3, device="cuda"))
    parts = make_parts("cuda", torch.float64, True)

    assert torch.autograd.gradgradcheck(multiply, parts)
    assert not any(ones.is_inference() for ones in linear._ONES.values())


@pytest.mark.parametrize("rows", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [0, 5, 37])
@pytest.mark.parametrize("is_split", [False, True])
def test_tall_products_take_pieces_and_are_not_rounded(real_device, rows, count, is_split, monkeypatch):
    monkeypatch.setattr(linear, "_LEAST_PIECE", 4)
    monkeypatch.setattr(linear, "runs_on_gpu", lambda rows: True)
    wide = rows if rows == torch.float64 or not is_split else torch.float32
    left, right = torch.randn(count, 6).to(real_device, rows), torch.randn(count, 3).to(real_device, wide)
    expected = left.double().t() @ right.double()

    with torch.no_grad():
        got, exact = multiply_tall(left, right), multiply_exactly(left.t(), right)

    assert got.dtype == (torch.float64 if rows == torch.float64 else torch.float32)
    assert exact.dtype == wide
    # A piece of 16 bits is rounded, a matrix in fp32 to 16 bits of its numbers.
    tolerance = {torch.bfloat16: 1e-2, torch.float16: 2e-3}.get(rows, 1e-5)
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=5 * tolerance)
    torch.testing.assert_close(exact.double(), expected, rtol=tolerance, atol=1e-4 if is_split else 5 * tolerance)


@pytest.mark.parametrize("count", [3, 37, 64])
def test_halves_are_added_up_as_the_rows_that_were_split(real_device, count, monkeypatch):
    monkeypatch.setattr(linear, "_LEAST_PIECE", 4)
    monkeypatch.setattr(linear, "runs_on_gpu", lambda rows: True)
    # The product of the whole is one of fp32 on a CPU.
    monkeypatch.setattr(linear, "multiply_widely", lambda rows, matrix: rows.float() @ matrix.float())
    left, right = torch.randn(count, 6).to(real_device, torch.bfloat16), torch.randn(count, 3).to(real_device)

    with torch.no_grad():
        got = multiply_tall_halves(left, torch.cat(split_in_two(right, torch.bfloat16), dim=1))

    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), left.double().t() @ right.double(), rtol=1e-2, atol=5e-2)


@pytest.mark.gpu
def test_wide_products_are_written_to_given_memory():
    rows, matrix = (torch.randn(64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty(64, 64, device="cuda")

    got = multiply_widely(rows, matrix, out)

    assert got.data_ptr() == out.data_ptr()
    torch.testing.assert_close(out.double(), rows.double() @ matrix.double(), rtol=1e-5, atol=1e-4)


@pytest.fixture
def in_pieces(monkeypatch):
    """Take the path of a GPU on any device."""
    monkeypatch.setattr(linear, "runs_on_gpu", lambda rows: True)
    monkeypatch.setattr(linear, "_LEAST_PIECE", 16)


@pytest.mark.parametrize("count", [0, 1, 31, 64, 331])
@pytest.mark.parametrize("is_whole", [False, True])
def test_heads_equal_torch(real_device, in_pieces, count, is_whole):
    rows = torch.randn(count, 3, 8, dtype=torch.float64, device=real_device)
    # Also rows that are part of wider ones.
    rows = (rows if is_whole else rows[:, :, 2:7]).requires_grad_()
    weight = torch.randn(3, rows.shape[2], 5, dtype=torch.float64, device=real_device, requires_grad=True)
    grad = torch.randn(count, 3, 5, dtype=torch.float64, device=real_device).transpose(0, 1)
    expected = torch.bmm(rows.transpose(0, 1), weight)

    got = multiply_heads(rows, weight)

    parts = [rows, weight]
    assert_near([got, *torch.autograd.grad(got, parts, grad)], [expected, *torch.autograd.grad(expected, parts, grad)])
    assert torch.autograd.gradgradcheck(multiply_heads, [part.detach().requires_grad_() for part in parts])


def test_heads_under_autocast_are_as_near_as_those_of_torch(real_device, in_pieces):
    rows = torch.randn(900, 2, 4, device=real_device)
    weight = torch.randn(2, 4, 3, device=real_device, requires_grad=True)
    grad = torch.randn(2, 900, 3, device=real_device)
    (exact,) = torch.autograd.grad(torch.bmm(rows.transpose(0, 1), weight), weight, grad)
    errors = []
    for compute in (lambda: torch.bmm(rows.transpose(0, 1), weight), lambda: multiply_heads(rows, weight)):
        with torch.autocast(real_device.type, torch.bfloat16):
            made = compute()
        assert made.dtype == torch.bfloat16
        (found,) = torch.autograd.grad(made, weight, grad.bfloat16())
        errors.append(float((found - exact).norm() / exact.norm()))

    assert errors[1] <= 1.5 * errors[0] + 1e-3


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [7, 0])
def test_products_are_written_or_added(real_device, adds, dtype, count):
    rows, matrix = torch.randn(count, 8, device=real_device).to(dtype), torch.randn(8, 16, device=real_device).to(dtype)
    before = torch.randn(count, 16, device=real_device)
    # Numbers that are not read.
    total = before.clone() if adds else torch.full_like(before, float("nan"))

    multiply_into(total, rows, matrix, adds=adds)

    expected = rows.float() @ matrix.float() + (before if adds else 0)
    tolerance = 1e-5 if dtype == torch.float32 or rows.is_cuda else 3e-2
    torch.testing.assert_close(total, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
def test_sums_in_fp32_do_without_the_sums_of_later_versions_of_torch(monkeypatch):
    rows, matrix = torch.randn(7, 8, device="cuda").bfloat16(), torch.randn(8, 16, device="cuda").bfloat16()
    totals = [torch.ones(7, 16, device="cuda") for _ in range(2)]
    multiply_into(totals[0], rows, matrix, adds=True)
    monkeypatch.setattr(linear, "_adds_widely", lambda *_: False)

    multiply_into(totals[1], rows, matrix, adds=True)

    torch.testing.assert_close(*totals)
