"""Rows stored in fewer bits come as the float32 they mean, equal on CPU and GPU."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from pyg_direct import Feature
from pyg_direct.compiler.jit import SIMULATED
from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.features.row_dtypes import narrow_rows
from tests.poison import poisoned_memory
from tests.reference.widen import widen_float8

STORES = [torch.float16, torch.bfloat16, torch.float8_e4m3fn]
# Numbers of a row: fewer and more than a piece of four, odd, wider than a group of threads; and more dimensions.
ROWS = [(), (1,), (2,), (3,), (4,), (7,), (25,), (100,), (128,), (602,), (3, 5), (2, 2, 4)]
IDS = [5, 0, 39, 5, 5, 17, 38, 1, 0]


def make_table(num_rows=40, row=(7,)):
    """Rows of all sizes from 2**-12 to 2**12, some zeros among them."""
    rows = torch.randn(num_rows, *row) * 2.0 ** torch.randint(-12, 13, (num_rows, *(1 for _ in row)))
    rows[torch.rand(rows.shape) < 0.1] = 0
    return rows


def bits_of(rows):
    return rows.cpu().contiguous().view(torch.int32)


def widen_by_torch(rows, store_dtype):
    """Return the rows as read, by torch's own conversions of one row at a time."""
    if store_dtype != torch.float8_e4m3fn:
        return rows.to(store_dtype).float()
    scales = [2.0 ** math.ceil(math.log2(row.abs().max().item() / 448)) if row.any() else 1.0 for row in rows]
    return torch.stack([(r / s).to(store_dtype).float() * s for r, s in zip(rows, scales, strict=True)])


@pytest.mark.parametrize("cache", [0, "20%", "100%"])
@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.parametrize("store_dtype", STORES, ids=str)
def test_rows_come_as_their_stored_numbers(device, store_dtype, row, cache):
    table = make_table(row=row)
    expected = widen_by_torch(table, store_dtype)[IDS]
    feature = Feature(device=device, device_cache_size=cache, store_dtype=store_dtype).from_cpu_tensor(table)

    with poisoned_memory():
        got = feature[torch.tensor(IDS, device=device)]

    assert (got.shape, got.dtype, got.device.type) == ((9, *row), torch.float32, device.type)
    assert torch.equal(bits_of(got), bits_of(expected))


@pytest.mark.parametrize("store_dtype", STORES, ids=str)
def test_many_rows_come_as_their_stored_numbers(device, store_dtype):
    table = make_table(2000, (25,))
    ids = torch.randint(2000, (1500 if SIMULATED else 5000,))
    feature = Feature(device=device, device_cache_size="30%", store_dtype=store_dtype).from_cpu_tensor(table)

    with poisoned_memory():
        got = feature[ids.to(device)]

    assert torch.equal(bits_of(got), bits_of(widen_by_torch(table, store_dtype)[ids]))


@pytest.mark.parametrize("store_dtype", [torch.float16, torch.bfloat16], ids=str)
def test_infinities_and_nans_stay_what_they_are(device, store_dtype):
    table = torch.tensor([[1.0, torch.inf, -torch.inf, torch.nan, 0.0]] * 3)
    feature = Feature(device=device, store_dtype=store_dtype).from_cpu_tensor(table)

    got = feature[[2, 0]]

    assert got.cpu().nan_to_num(7.0, 8.0, 9.0).tolist() == [[1.0, 8.0, 9.0, 7.0, 0.0]] * 2


def test_a_nan_in_a_float8_row_leaves_the_others(device):
    table = torch.tensor([[1.0, torch.nan, -3.5, 448.0]])
    feature = Feature(device=device, store_dtype=torch.float8_e4m3fn).from_cpu_tensor(table)

    got = feature[[0]]

    assert got.cpu().nan_to_num(7.0).tolist() == [[1.0, 7.0, -3.5, 448.0]]


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=5))
def test_a_float8_row_is_within_a_sixteenth(numbers):
    row = torch.tensor([numbers])
    size = row.abs().max().item()

    stored, exponents = narrow_rows(row, torch.float8_e4m3fn)

    scale = 2.0 ** (exponents.item() - 127)
    got = np.array([widen_float8(code) for code in stored.view(torch.uint8)[0].tolist()]) * scale
    # Half a step: of the number itself, or of the smallest numbers of its row; and no more than the format's end.
    allowed = np.maximum(np.abs(row[0].double().numpy()) / 16, scale * 2.0**-10)
    assert (np.abs(got - row[0].double().numpy()) <= allowed).all() or size > 448 * 2.0**119
    assert size <= 448 * scale or exponents.item() == 127 + 119
    assert 2 * size > 448 * scale or exponents.item() == 127 - 117 or size == 0


@pytest.mark.gpu
@pytest.mark.parametrize("store_dtype", STORES, ids=str)
def test_the_gpu_stores_what_the_cpu_stores(store_dtype):
    table = make_table(500, (33,)) * 2.0 ** torch.randint(-100, 100, (500, 1))
    table = table.clamp(-6e4, 6e4) if store_dtype == torch.float16 else table

    stored, exponents = narrow_rows(table.cuda(), store_dtype)

    expected, expected_exponents = narrow_rows(table, store_dtype)
    assert torch.equal(stored.cpu().view(torch.uint8), expected.view(torch.uint8))
    assert exponents is None or torch.equal(exponents.cpu(), expected_exponents)


def test_the_table_stays_as_it_is(device):
    table = make_table()
    before, address = table.clone(), table.data_ptr()

    feature = Feature(device=device, store_dtype=torch.float16).from_cpu_tensor(table)

    assert torch.equal(table, before)
    assert table.data_ptr() == address
    assert (feature.dtype, feature.store_dtype, feature.shape) == (torch.float32, torch.float16, table.shape)


def test_rows_in_the_stored_dtype_already_are_taken_as_they_are(device):
    table = make_table().to(torch.bfloat16)
    expected = table[IDS]

    feature = Feature(device=device, store_dtype=torch.bfloat16).from_cpu_tensor(table)

    assert feature[IDS].dtype == torch.bfloat16
    assert torch.equal(feature[IDS].cpu(), expected)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
@pytest.mark.parametrize("store_dtype", STORES, ids=str)
def test_empty_rows_may_be_stored(device, store_dtype, shape):
    feature = Feature(device=device, store_dtype=store_dtype).from_cpu_tensor(torch.empty(shape))

    got = feature[torch.arange(shape[0])]

    assert (got.shape, got.dtype) == (shape, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("store_dtype", STORES, ids=str)
def test_a_bad_id_on_the_gpu_gives_zeros(store_dtype):
    table = make_table(row=(25,))
    feature = Feature(device_cache_size="20%", store_dtype=store_dtype).from_cpu_tensor(table)

    with poisoned_memory():
        got = feature[torch.tensor([3, 40, -1, 0], device="cuda")]

    expected = widen_by_torch(table, store_dtype)[[3, 0, 0, 0]]
    expected[1:3] = 0
    assert torch.equal(bits_of(got), bits_of(expected))


@pytest.mark.gpu
def test_half_the_bytes_hold_twice_the_rows():
    rows = [Feature(device_cache_size="80B", store_dtype=dtype).from_cpu_tensor(torch.ones(40, 5)).num_hot_rows
            for dtype in (None, torch.bfloat16, torch.float8_e4m3fn)]  # fmt: skip

    assert rows == [4, 8, 16]


@pytest.mark.parametrize(("store_dtype", "error", "words"), [
    (torch.float64, ArgumentError, "store_dtype must be one of torch.float16, torch.bfloat16, torch.float8_e4m3fn, "
                                   "got torch.float64"),
    (torch.int8, ArgumentError, "got torch.int8"),
    ("float16", ArgumentTypeError, "store_dtype must be a torch.dtype, got 'float16'"),
])  # fmt: skip
def test_dtypes_that_make_no_sense_are_refused(store_dtype, error, words):
    with pytest.raises(error, match=words):
        Feature(device="cpu", store_dtype=store_dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.uint8, torch.bfloat16, torch.complex64], ids=str)
def test_rows_of_other_dtypes_are_not_stored_in_fewer_bits(device, dtype):
    feature = Feature(device=device, store_dtype=torch.float16)

    with pytest.raises(ArgumentError, match=f"store_dtype=torch.float16 needs rows of torch.float32, got {dtype}"):
        feature.from_cpu_tensor(torch.zeros(3, 2, dtype=dtype))


@pytest.mark.parametrize(("store_dtype", "number", "words"), [
    (torch.float16, 7e4, "store_dtype=torch.float16 holds numbers up to 65504, got 70000"),
    (torch.float16, -7e4, "got -70000"),
    (torch.bfloat16, 3.4e38, "store_dtype=torch.bfloat16 holds numbers up to 3.38953e"),
    (torch.float8_e4m3fn, torch.inf, "store_dtype=torch.float8_e4m3fn holds finite numbers and NaN only"),
])  # fmt: skip
def test_numbers_that_would_be_lost_are_refused(device, store_dtype, number, words):
    table = make_table()
    table[3, 2], table[1, 1] = number, torch.nan

    with pytest.raises(ArgumentError, match=words):
        Feature(device=device, store_dtype=store_dtype).from_cpu_tensor(table)


def test_a_feature_whose_first_rows_were_refused_is_empty(device):
    feature = Feature(device=device, store_dtype=torch.float16)
    with pytest.raises(ArgumentError, match="holds numbers up to 65504"):
        feature.from_cpu_tensor(torch.full((4, 3), 7e4))

    for read in (feature.__getitem__, feature.read):
        with pytest.raises(ArgumentError, match="this Feature holds no rows yet"):
            read(torch.tensor([0], device=device))
    assert feature.from_cpu_tensor(torch.ones(5, 3))[[4]].tolist() == [[1.0, 1.0, 1.0]]
