"""A feature gives the rows of its table bit for bit, wherever they lie."""

import copy

import numpy as np
import pytest
import torch

from pyg_direct import CSRTopo, Feature
from pyg_direct.errors import ArgumentError, ArgumentTypeError, DeviceError, IdError, PygDirectError
from pyg_direct.features.hot_rows import choose_hottest, count_listings
from tests.features.contract import DTYPES, bytes_of, make_rows
from tests.poison import poisoned_memory

ROWS = [(), (1,), (2,), (3,), (4,), (7,), (25,), (32,), (100,), (3, 5), (4, 4), (2, 3, 5), (2, 2, 4)]
CACHES = [0, "20%", 700, "0.5K", "100%", "1G"]
IDS = [5, 0, 39, 5, 5, 17, 38, 1, 0]


def make_table(num_rows=40, row=(3,), dtype=torch.float32):
    return make_rows(num_rows, row, dtype)


def read_poisoned(feature, ids):
    with poisoned_memory():
        return feature[ids]


@pytest.mark.parametrize("cache", [0, "20%", "100%"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_any_dtype_come_bit_for_bit(device, dtype, cache):
    table = make_table(row=(5,), dtype=dtype)
    expected = bytes_of(table)[IDS]
    feature = Feature(device=device, device_cache_size=cache).from_cpu_tensor(table)

    got = read_poisoned(feature, torch.tensor(IDS, device=device))

    assert (got.shape, got.dtype, got.device.type) == ((9, 5), dtype, device.type)
    assert torch.equal(bytes_of(got), expected)


@pytest.mark.gpu
def test_a_feature_on_the_cpu_waits_for_ids_of_a_gpu():
    feature = Feature(device="cpu").from_cpu_tensor(torch.arange(100.0))
    ids = torch.zeros(50_000, dtype=torch.int64, device="cuda")

    torch.cuda._sleep(200_000_000)
    ids += 7

    assert feature[ids].unique().tolist() == [7]


@pytest.mark.parametrize("cache", [0, "20%", "100%"])
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_rows_of_any_shape_come_bit_for_bit(device, row, cache):
    table = make_table(row=row)
    expected = bytes_of(table)[IDS]
    feature = Feature(device=device, device_cache_size=cache).from_cpu_tensor(table)

    got = read_poisoned(feature, torch.tensor(IDS, device=device))

    assert got.shape == (9, *row)
    assert torch.equal(bytes_of(got), expected)


@pytest.mark.parametrize("cache", CACHES)
def test_the_size_of_the_cache_changes_no_row(device, cache):
    table = make_table(num_rows=70, row=(7,))
    ids = torch.randint(70, (500,))
    expected = bytes_of(table)[ids]
    feature = Feature(device_cache_size=cache, device=device).from_cpu_tensor(table)

    got = read_poisoned(feature, ids.to(device))

    assert torch.equal(bytes_of(got), expected)


@pytest.mark.parametrize(
    "ids",
    [[3, 1, 3], (3, 1, 3), np.array([3, 1, 3]), torch.tensor([3, 1, 3]), torch.tensor([3, 1, 3], dtype=torch.int32),
     torch.tensor([3, 9, 1, 9, 3, 9])[::2]],
    ids=["list", "tuple", "numpy", "int64", "int32", "strided"],
)  # fmt: skip
def test_ids_may_come_from_the_host_in_any_form(device, ids):
    table = make_table()
    expected = bytes_of(table)[[3, 1, 3]]
    feature = Feature(device=device, device_cache_size="20%").from_cpu_tensor(table)

    got = read_poisoned(feature, ids)

    assert torch.equal(bytes_of(got), expected)
    assert got.device.type == device.type


def test_ids_of_32_bits_are_read_where_they_lie(device):
    table = make_table()
    expected = bytes_of(table)[IDS]
    feature = Feature(device=device, device_cache_size="20%").from_cpu_tensor(table)

    got = read_poisoned(feature, torch.tensor(IDS, dtype=torch.int32, device=device))

    assert torch.equal(bytes_of(got), expected)


@pytest.mark.parametrize("ids", [[], torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32)], ids=str)
def test_no_ids_give_no_rows(device, ids):
    feature = Feature(device=device, device_cache_size="20%").from_cpu_tensor(make_table(row=(3, 2)))

    got = feature[ids]

    assert (got.shape, got.dtype) == ((0, 3, 2), torch.float32)


@pytest.mark.parametrize("shape", [(4, 0), (4, 3, 0), (4, 0, 2)])
def test_rows_may_have_no_width(device, shape):
    feature = Feature(device=device, device_cache_size="20%").from_cpu_tensor(torch.empty(shape))

    got = feature[[3, 1, 1]]

    assert got.shape == (3, *shape[1:])


def test_a_table_may_have_no_rows(device):
    feature = Feature(device=device).from_cpu_tensor(torch.empty(0, 5))

    got = feature[[]]

    assert (feature.shape, got.shape) == ((0, 5), (0, 5))
    with pytest.raises(IdError, match=r"must lie in \[0, 0\), got 0"):
        feature[[0]]


@pytest.mark.parametrize(
    "change",
    [lambda t: t.t().contiguous().t(), lambda t: t[::2], lambda t: t[1:], lambda t: t.clone().requires_grad_(),
     lambda t: t.expand(2, *t.shape)[1], lambda t: t[:1].expand(30, 3)],
    ids=["transposed", "strided", "offset", "requires_grad", "expanded", "one row"],
)  # fmt: skip
def test_the_table_may_be_any_view(device, change):
    table = change(make_table(num_rows=61))
    expected = bytes_of(table.detach())[[0, 7, 7, 29]]
    feature = Feature(device=device, device_cache_size="20%").from_cpu_tensor(table)

    got = read_poisoned(feature, [0, 7, 7, 29])

    assert torch.equal(bytes_of(got), expected)
    assert not got.requires_grad


def test_a_conjugated_table_is_read_as_it_looks(device):
    table = make_table(dtype=torch.complex64).conj()
    expected = bytes_of(table.resolve_conj())[IDS]
    feature = Feature(device=device, device_cache_size="20%").from_cpu_tensor(table)

    got = read_poisoned(feature, IDS)

    assert torch.equal(bytes_of(got), expected)


def test_it_looks_like_its_table(device):
    table = make_table(row=(3, 5), dtype=torch.int16)

    feature = Feature(rank=0, device_list=[0], device_cache_size="1K", device=device).from_cpu_tensor(table)

    assert (feature.shape, feature.size(), feature.size(1), feature.dim()) == ((40, 3, 5), (40, 3, 5), 3, 3)
    assert feature.dtype == torch.int16
    assert "[40, 3, 5] of torch.int16" in repr(feature)


def test_filling_returns_the_feature_itself(device):
    feature = Feature(device=device)

    got = feature.from_cpu_tensor(make_table())

    assert got is feature


def test_filling_again_replaces_the_rows(device):
    feature = Feature(device=device, device_cache_size="20%").from_cpu_tensor(make_table(num_rows=9))
    table = make_table(num_rows=40, row=(2,), dtype=torch.int64)
    expected = table[IDS]

    feature.from_cpu_tensor(table)

    assert torch.equal(feature[IDS].cpu(), expected)
    assert feature.shape == (40, 2)


def test_on_the_cpu_the_rows_stay_where_they_are():
    table = make_table()

    feature = Feature(device="cpu", device_cache_size="100%").from_cpu_tensor(table)

    table[3] = 7
    assert feature[[3]].tolist() == [[7.0] * 3]
    assert (feature.placement, feature.num_hot_rows) == ("cpu", 0)


def test_rows_given_out_are_copies(device):
    feature = Feature(device=device, device_cache_size="20%").from_cpu_tensor(torch.arange(40.0).view(40, 1))

    feature[[3, 20]].fill_(-1)

    assert feature[[3, 20]].tolist() == [[3.0], [20.0]]


def test_the_hottest_rows_are_those_listed_most():
    topo = CSRTopo(torch.tensor([[4, 4, 4, 2, 2, 0, 4, 1], [0, 1, 2, 0, 1, 2, 3, 4]]), num_nodes=6)

    chosen = [choose_hottest(count_listings(topo, 8), 8, count) for count in (0, 1, 2, 3, 8)]

    assert count_listings(topo, 8).tolist() == [1, 1, 2, 0, 4, 0, 0, 0]
    assert [hottest.tolist() for hottest, _ in chosen] == [[], [4], [2, 4], [0, 2, 4], list(range(8))]
    assert [misses for _, misses in chosen] == [1, 1 / 2, 1 / 4, 1 / 8, 0]


def test_without_a_graph_the_first_rows_are_hot():
    hottest, misses = choose_hottest(None, 8, 3)

    assert (hottest.tolist(), misses) == ([0, 1, 2], 5 / 8)


@pytest.mark.parametrize(("ids", "value"), [([0, 40], 40), ([-1, 3], -1), ([2**40], 2**40)])
def test_ids_out_of_range_are_refused_and_the_feature_stays_usable(device, ids, value):
    table = make_table()
    expected = bytes_of(table)[[39]]
    feature = Feature(device=device, device_cache_size="20%").from_cpu_tensor(table)

    with pytest.raises(IdError, match=rf"node_idx must lie in \[0, 40\), got {value}"):
        feature[ids]

    assert torch.equal(bytes_of(feature[[39]]), expected)


@pytest.mark.parametrize("ids", [[0.5], [True], torch.tensor([1.0]), torch.tensor([1], dtype=torch.int16)], ids=str)
def test_ids_of_other_dtypes_are_refused(device, ids):
    feature = Feature(device=device).from_cpu_tensor(make_table())

    with pytest.raises(ArgumentTypeError, match="node_idx must have dtype int64 or int32, got torch"):
        feature[ids]


@pytest.mark.parametrize("ids", [3, torch.tensor(3), [[1, 2]]], ids=str)
def test_ids_of_other_shapes_are_refused(device, ids):
    feature = Feature(device=device).from_cpu_tensor(make_table())

    with pytest.raises(ArgumentError, match="node_idx must have one dimension"):
        feature[ids]


def test_an_empty_feature_says_what_to_call(device):
    feature = Feature(device=device)

    with pytest.raises(ArgumentError, match="call from_cpu_tensor or from_file first"):
        feature[[0]]
    with pytest.raises(ArgumentError, match="call from_cpu_tensor or from_file first"):
        feature.size()
    assert "empty" in repr(feature)


def test_a_scalar_is_no_table(device):
    with pytest.raises(ArgumentError, match="at least one dimension"):
        Feature(device=device).from_cpu_tensor(torch.tensor(1.0))


@pytest.mark.parametrize(("table", "kind"), [([[1.0]], "list"), (torch.eye(3).to_sparse(), "torch.sparse_coo")])
def test_what_is_not_dense_is_no_table(device, table, kind):
    with pytest.raises(ArgumentTypeError, match=f"cpu_tensor must be a dense tensor, got {kind}"):
        Feature(device=device).from_cpu_tensor(table)


@pytest.mark.parametrize(("options", "table", "words"), [
    ({"store_dtype": torch.float16}, torch.full((40, 5), 1e6), "holds numbers up to 65504, got 1e"),
    ({"store_dtype": torch.float16}, torch.arange(40).view(40, 1), "needs rows of torch.float32, got torch.int64"),
    ({"store_dtype": torch.float8_e4m3fn}, torch.full((40, 5), -torch.inf), "got an infinity"),
    ({"hotness": torch.arange(40), "device_cache_size": "20%"}, torch.rand(41, 5), "each of the 41 rows, got 40"),
    ({}, torch.empty(40, 5, device="meta"), "cpu_tensor must be a dense tensor, got one on device meta"),
    ({}, torch.tensor(1.0), "at least one dimension"),
])  # fmt: skip
def test_rows_that_are_refused_leave_those_so_far(device, options, table, words):
    feature = Feature(device=device, **options).from_cpu_tensor(torch.ones(40, 5))
    # Only a GPU has rows that must be ranked; refused rows go to no tier.
    own, feature.device = feature.device, torch.device("cuda", 0)

    with pytest.raises(PygDirectError, match=words):
        feature.from_cpu_tensor(table)

    feature.device = own
    assert feature.shape == (40, 5)
    assert feature[[39, 0]].tolist() == [[1.0] * 5] * 2


@pytest.mark.parametrize("store_dtype", [torch.float16, torch.float8_e4m3fn])
def test_rows_with_infinities_and_nans_that_are_taken_first_are_taken_again(device, store_dtype):
    table = torch.ones(40, 5)
    table[3, 2], table[4, 1] = torch.nan, torch.inf if store_dtype == torch.float16 else 0.5
    feature = Feature(device=device, store_dtype=store_dtype).from_cpu_tensor(table)
    expected = feature[[3, 4]].cpu()

    feature.from_cpu_tensor(table)

    assert torch.equal(feature[[3, 4]].cpu().nan_to_num(9.0), expected.nan_to_num(9.0))


def test_every_node_needs_a_row(device):
    topo = CSRTopo(torch.tensor([[0, 1], [1, 2]]), num_nodes=41)

    with pytest.raises(ArgumentError, match="a row for each of the 41 nodes of csr_topo, got 40"):
        Feature(csr_topo=topo, device=device).from_cpu_tensor(make_table())


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"cache_policy": "replicate"}, ArgumentError, "cache_policy must be one of"),
        ({"device_cache_size": "many"}, ArgumentError, "device_cache_size must look like"),
        ({"device_cache_size": -1}, ArgumentError, "device_cache_size must be at least 0"),
        ({"device_cache_size": "120%"}, ArgumentError, "device_cache_size must be at most 100%"),
        ({"device_cache_size": 0.2}, ArgumentTypeError, "device_cache_size must be a number of bytes"),
        ({"csr_topo": torch.zeros(2, 3)}, ArgumentTypeError, "csr_topo must be a CSRTopo, got Tensor"),
        ({"csr_topo": 3}, ArgumentTypeError, "csr_topo must be a CSRTopo, got int"),
        ({"placement": "mmap"}, ArgumentError, "placement must be 'unified' or 'pinned', got 'mmap'"),
        ({"device": "tpu"}, ArgumentError, "device must name a torch device"),
    ],
)  # fmt: skip
def test_bad_options_are_named(options, error, words):
    with pytest.raises(error, match=words):
        Feature(**options)


def test_a_gpu_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(DeviceError, match="device='cuda' asks for a GPU"):
        Feature(device="cuda")
    assert Feature(rank=0).device == torch.device("cpu")


@pytest.mark.parametrize("count", [0, 5, 5000])
def test_ids_of_a_sampler_give_the_same_rows(real_device, count):
    feature = Feature(device=real_device).from_cpu_tensor(torch.randn(300, 9))
    ids = torch.randint(300, (count,), device=real_device)

    assert torch.equal(feature.read(ids), feature[ids])


@pytest.mark.parametrize("count", [2, 5000])
def test_a_bad_id_of_a_sampler_is_named_on_the_cpu(count):
    feature = Feature(device="cpu").from_cpu_tensor(torch.randn(300, 9))

    with pytest.raises(IdError, match=r"node_idx must lie in \[0, 300\), got 300"):
        feature.read(torch.arange(301 - count, 301).clamp(min=0))


@pytest.mark.parametrize("cache", [0, "20%", "100%"])
def test_ids_of_a_sampler_are_those_that_rows_were_given_last(device, cache):
    table, ids = make_table(), torch.tensor(IDS, device=device)
    expected = bytes_of(table)
    feature = Feature(device=device, device_cache_size=cache).from_cpu_tensor(table)

    before = feature.read(ids)
    feature.set_local_order(torch.arange(39, -1, -1))
    after = feature.read(ids)

    assert torch.equal(bytes_of(before), expected[IDS])
    assert torch.equal(bytes_of(after), expected.flip(0)[IDS])


def test_reads_of_a_copy_are_counted_alone(device):
    feature = Feature(device=device).from_cpu_tensor(make_table())
    feature.count_served()
    feature[IDS]

    other = copy.copy(feature)
    other[IDS[:4]]

    assert (feature.tell().num_read, other.tell().num_read) == (9, 13)


@pytest.mark.parametrize("ids", [slice(2, 5), None, ..., "first", [[1], [2, 3]]])
def test_what_holds_no_ids_is_named(ids):
    with pytest.raises(ArgumentTypeError, match="node_idx must be ids, got"):
        Feature(device="cpu").from_cpu_tensor(make_table())[ids]


@pytest.mark.parametrize("store_dtype", [None, torch.bfloat16, torch.float8_e4m3fn])
def test_a_deep_copy_has_rows_of_its_own(device, store_dtype):
    table = torch.rand(40, 3)
    feature = Feature(device=device, device_cache_size="100%", store_dtype=store_dtype).from_cpu_tensor(table)
    before = feature[torch.arange(40)]

    other = copy.deepcopy(feature)

    other.update_(torch.tensor([3]), torch.zeros(1, 3))
    assert torch.equal(feature[torch.arange(40)], before)
    assert torch.equal(other[torch.tensor([4, 3])], torch.stack([before[4], torch.zeros_like(before[3])]))
    feature.update_(torch.tensor([4]), torch.zeros(1, 3))
    assert torch.equal(other[torch.tensor([4])], before[4:5])


def test_a_copy_has_the_same_rows(device):
    feature = Feature(device=device, device_cache_size="100%").from_cpu_tensor(torch.rand(40, 3))

    other = copy.copy(feature)

    other.update_(torch.tensor([3]), torch.zeros(1, 3))
    assert feature[torch.tensor([3])].eq(0).all()


def test_a_copy_of_a_feature_without_rows_takes_others(device):
    feature = Feature(device=device)

    for other in (copy.copy(feature), copy.deepcopy(feature)):
        assert other.from_cpu_tensor(torch.rand(4, 3)).shape == (4, 3)
    with pytest.raises(ArgumentError):
        feature.size()
