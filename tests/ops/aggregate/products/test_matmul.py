"""Products are equal by either library, and by the faster one."""

import pytest
import torch

from pyg_direct.ops.aggregate import products
from pyg_direct.ops.aggregate.products import multiply

ROWS, WIDTH, COLUMNS = 300, 70, 110


@pytest.fixture
def onednn(monkeypatch):
    """Arguments of its calls; it takes half of the time of others."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("torch is without oneDNN")
    called = []
    run = torch.ops.mkldnn._linear_pointwise

    def listen(x, weight, *rest):
        called.append((x, weight))
        return run(x, weight, *rest)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", listen)
    monkeypatch.setattr(products, "_compare", lambda num_threads: 2.0)
    return called


def lay(rows, columns, layout, dtype=torch.float32):
    """Random numbers, with others between them or not."""
    match layout:
        case "dense":
            return torch.randn(rows, columns, dtype=dtype)
        case "turned":
            return torch.randn(columns, rows, dtype=dtype).t()
        case "columns":
            return torch.randn(rows, columns + 9, dtype=dtype)[:, 4:-5]
        case "turned rows":
            return torch.randn(columns, rows + 9, dtype=dtype)[:, 4:-5].t()
    raise AssertionError(layout)


LAYOUTS = ["dense", "turned", "columns", "turned rows"]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("of_weight", LAYOUTS)
@pytest.mark.parametrize("of_x", LAYOUTS)
def test_any_layout_gives_the_same_product(onednn, of_x, of_weight, has_bias):
    x, weight = lay(ROWS, WIDTH, of_x), lay(COLUMNS, WIDTH, of_weight)
    bias = torch.randn(COLUMNS) if has_bias else None
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())

    got = multiply(x, weight, bias)

    torch.testing.assert_close(got, expected.float(), rtol=1e-5, atol=1e-4)
    ((given, packed),) = onednn
    # Of others it takes a thousand times as long.
    assert packed.is_contiguous() or packed.t().is_contiguous()
    assert given.stride(1) == 1 or given.t().is_contiguous()


def test_rows_may_have_further_dimensions(onednn):
    x, weight, bias = torch.randn(60, 5, WIDTH), torch.randn(COLUMNS, WIDTH), torch.randn(COLUMNS)

    got = multiply(x, weight, bias)

    assert len(onednn) == 1
    torch.testing.assert_close(got, torch.nn.functional.linear(x, weight, bias), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("reason", ["few", "double", "off", "no faster"])
def test_other_products_stay_with_torch(onednn, monkeypatch, reason):
    dtype = torch.float64 if reason == "double" else torch.float32
    x, weight = lay(10 if reason == "few" else ROWS, WIDTH, "dense", dtype), lay(COLUMNS, WIDTH, "dense", dtype)
    if reason == "no faster":
        monkeypatch.setattr(products, "_compare", lambda num_threads: 1.1)

    with torch.backends.mkldnn.flags(enabled=reason != "off", allow_tf32=None):
        got = multiply(x, weight)

    assert not onednn
    assert torch.equal(got, x @ weight.t())


def test_what_was_measured_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("PYG_DIRECT_CACHE", str(tmp_path))
    ratio = products._compare.__wrapped__(1)
    monkeypatch.setattr(products, "_measure", None)

    assert products._compare.__wrapped__(1) == ratio
    assert (ratio > 0) == torch.backends.mkldnn.is_available()


def test_torch_without_onednn_is_not_measured(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(products, "_measure", None)

    assert products._compare.__wrapped__(1) == 0
