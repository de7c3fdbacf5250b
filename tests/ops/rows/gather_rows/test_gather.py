import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from pyg_direct.compiler.jit import SIMULATED
from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError
from pyg_direct.kernels.batch_counters import NO_POSITION
from pyg_direct.ops.rows.gather_rows import Directory, gather_rows
from tests.poison import poisoned_memory
from tests.reference import gather as reference, widen

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.uint8, torch.int8, torch.int16,
          torch.int32, torch.int64, torch.bool, torch.complex64]  # fmt: skip
# Elements of a row: one, odd, a multiple of 16 bytes, wider than a group of lanes; and more dimensions than one.
ROWS = [(), (1,), (3,), (8,), (25,), (128,), (602,), (2, 3), (4, 1, 4)]
IDS = [6, 0, 9, 9, 3, 0, 8]


def make_table(num_rows, row, dtype=torch.float32, device="cpu"):
    """A table in which every element differs from its neighbors."""
    values = torch.arange(1, num_rows * int(np.prod(row)) + 1).reshape(num_rows, *row)
    return (values % 2 if dtype == torch.bool else values).to(dtype).to(device)


def read_bytes(tensor):
    """The bytes of a tensor of any dtype, a row a line."""
    tensor = tensor.cpu().contiguous()
    return tensor.reshape(len(tensor), -1).view(torch.uint8).numpy()


def expect_rows(table, ids):
    return reference.gather_rows(read_bytes(table), ids).tolist()


@pytest.mark.parametrize("row", [(3,), (8,), (2, 3), ()])
def test_matches_reference(device, row):
    table = make_table(10, row, device=device)

    with poisoned_memory():
        got = gather_rows(table, torch.tensor(IDS, device=device))

    assert read_bytes(got).tolist() == expect_rows(table, IDS)
    assert got.shape == (7, *row)
    assert (got.dtype, got.device) == (table.dtype, table.device)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, torch.complex64, torch.bool], ids=str)
def test_one_item_of_a_wider_table_is_read(device, dtype):
    # torch calls it contiguous, whatever lies between it and the next.
    table = torch.tensor([[1, 0, 0]], device=device).to(dtype)[:, 0]

    assert gather_rows(table, torch.tensor([0, 0], device=device)).tolist() == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row", ROWS)
def test_any_row_of_any_dtype_matches_reference(device, row, dtype):
    table = make_table(10, row, dtype, device)

    with poisoned_memory():
        got = gather_rows(table, torch.tensor(IDS, dtype=torch.int32, device=device))

    assert read_bytes(got).tolist() == expect_rows(table, IDS)
    assert (got.dtype, got.shape) == (dtype, (7, *row))


@pytest.mark.parametrize("max_blocks", [None, 2], ids=["free", "capped"])
@pytest.mark.parametrize("offset", [1, 2, 4, 16])
@pytest.mark.parametrize("width", [16, 20])
def test_rows_off_any_line_match_reference(device, offset, width, max_blocks):
    memory = torch.arange(offset + 10 * width, device=device).to(torch.uint8)
    table = memory[offset:].view(10, width)

    got = gather_rows(table, torch.tensor(IDS, device=device), max_blocks=max_blocks)

    assert read_bytes(got).tolist() == expect_rows(table, IDS)


@pytest.mark.gpu
@pytest.mark.parametrize("max_blocks", [None, 3], ids=["free", "capped"])
@pytest.mark.parametrize("out_offset", [0, 1, 4])
@pytest.mark.parametrize("offset", [0, 1, 2, 4, 8, 16])
@pytest.mark.parametrize("width", [*range(1, 21), 33, 36, 50, 64, 100, 128, 400, 602, 1040, 1433, 2064, 2076, 8192])
def test_rows_of_any_width_fill_the_output_and_no_byte_more(width, offset, out_offset, max_blocks):
    memory = torch.randint(256, (offset + 50 * width,), dtype=torch.uint8, device="cuda")
    table = memory[offset:].view(50, width)
    ids = torch.randint(50, (677,), device="cuda")
    target = torch.full((out_offset + 677 * width + 32,), 77, dtype=torch.uint8, device="cuda")

    gather_rows(table, ids, out=target[out_offset : out_offset + 677 * width].view(677, width), max_blocks=max_blocks)

    expected = table[ids]
    assert torch.equal(target[out_offset : out_offset + 677 * width].view(677, width), expected)
    assert target[:out_offset].eq(77).all()
    assert target[out_offset + 677 * width :].eq(77).all()


def test_writes_where_it_is_told_and_nowhere_else(device):
    table = make_table(10, (4,), device=device)
    memory = torch.full((4 + 7 * 4 + 4,), -77.0, device=device)

    got = gather_rows(table, torch.tensor(IDS, device=device), out=memory[4:-4].view(7, 4))

    assert got.data_ptr() == memory[4:].data_ptr()
    assert read_bytes(got).tolist() == expect_rows(table, IDS)
    assert memory[:4].tolist() == memory[-4:].tolist() == [-77.0] * 4


@pytest.mark.parametrize("hot_ids", [[], [5], [9, 0, 3], list(range(10))])
@pytest.mark.parametrize("width", [3, 4])
def test_hot_rows_come_from_the_hot_table(device, hot_ids, width):
    table = make_table(10, (width,), device=device)
    # Hot rows differ from the table's, so that a wrong tier shows.
    hot = -table[sorted(hot_ids)].contiguous()
    directory = Directory.of(torch.tensor(hot_ids, dtype=torch.int64, device=device), 10)
    expected = [row if item not in hot_ids else [-value for value in row]
                for item, row in zip(IDS, table[IDS].tolist(), strict=True)]  # fmt: skip

    with poisoned_memory():
        got = gather_rows(hot, torch.tensor(IDS, device=device), cold=table, directory=directory)

    assert got.tolist() == expected


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=str)
@pytest.mark.parametrize("max_blocks", [None, 3], ids=["free", "capped"])
@pytest.mark.parametrize("width", [1, 3, 7, 25, 100, 128, 150, 602])
def test_hot_rows_of_any_width_come_from_the_hot_table(width, max_blocks, dtype):
    table = torch.randint(100, (500, width), device="cuda").to(dtype)
    hot_ids = torch.randperm(500, device="cuda")[:200].sort().values
    hot = table[hot_ids] + 100
    ids = torch.randint(500, (3000,), dtype=torch.int32, device="cuda")

    with poisoned_memory():
        got = gather_rows(hot, ids, cold=table, directory=Directory.of(hot_ids, 500), max_blocks=max_blocks)

    expected = table.clone()
    expected[hot_ids] = hot
    assert torch.equal(got, expected[ids.long()])


@pytest.mark.parametrize("store_dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_every_stored_number_is_widened_to_what_it_means(device, store_dtype):
    name, num_codes = str(store_dtype).removeprefix("torch."), 1 << 8 * store_dtype.itemsize
    # The simulator takes its time.
    codes = range(0, num_codes, 61 if SIMULATED and num_codes > 256 else 1)
    unit = torch.int16 if store_dtype.itemsize == 2 else torch.uint8
    table = torch.tensor(codes, dtype=torch.int32).to(unit).view(-1, 1).view(store_dtype).to(device)
    exponents = torch.full((len(codes),), 127, dtype=torch.uint8, device=device)

    with poisoned_memory():
        got = gather_rows(table, torch.arange(len(codes), device=device), dtype=torch.float32, exponents=exponents)

    expected = [widen.widen_bits(name, code) for code in codes]
    assert (got.view(torch.int32).flatten().cpu().long() & 0xFFFFFFFF).tolist() == expected


@pytest.mark.gpu
@pytest.mark.parametrize("max_blocks", [None, 3], ids=["free", "capped"])
@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 25, 128])
@pytest.mark.parametrize("store_dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_every_shape_of_grid_widens_every_stored_number_alike(store_dtype, width, max_blocks):
    num_codes, unit = 1 << 8 * store_dtype.itemsize, torch.int16 if store_dtype.itemsize == 2 else torch.uint8
    codes = torch.arange(num_codes * width, device="cuda").remainder(num_codes).to(unit).view(-1, width)
    exponents = torch.randint(10, 247, (len(codes),), dtype=torch.uint8, device="cuda")
    ids = torch.randint(-1, len(codes), (5000,), device="cuda")
    directory = Directory.of(torch.arange(0, len(codes), 2, device="cuda"), len(codes))

    got = [gather_rows(table.view(store_dtype), ids, dtype=torch.float32, exponents=exponents, max_blocks=max_blocks,
                       **tiers).cpu()
           for table, tiers in ((codes, {}), (codes[::2].contiguous(), {"cold": codes.view(store_dtype),
                                                                         "directory": directory}))]  # fmt: skip

    kept = ids.clamp(min=0).cpu()
    expected = gather_rows(codes.cpu().view(store_dtype), kept, dtype=torch.float32, exponents=exponents.cpu())
    expected[ids.cpu() < 0] = 0
    assert torch.equal(got[0].view(torch.int32), expected.view(torch.int32))
    assert torch.equal(got[1].view(torch.int32), expected.view(torch.int32))


@given(hot_ids=st.sets(st.integers(0, 99)), ids=st.lists(st.integers(0, 99), max_size=20))
def test_any_split_gives_the_rows_of_the_whole(device, hot_ids, ids):
    table = make_table(100, (2,), device=device)
    hot = table[sorted(hot_ids)].contiguous()
    directory = Directory.of(torch.tensor(list(hot_ids), dtype=torch.int32, device=device), 100)

    got = gather_rows(hot, torch.tensor(ids, dtype=torch.int64, device=device), cold=table, directory=directory)

    assert torch.equal(got, table[ids])


@pytest.mark.parametrize("num_rows", [1, 31, 32, 33, 1000])
def test_directory_matches_reference(device, num_rows):
    hot_ids = sorted({0, num_rows // 2, num_rows - 1, min(31, num_rows - 1)}, key=lambda item: -item)
    bits, ranks = reference.make_directory(hot_ids, num_rows)

    with poisoned_memory():
        got = Directory.of(torch.tensor(hot_ids, device=device), num_rows)

    assert (got.bits.tolist(), got.ranks.tolist()) == (bits, ranks)
    assert (got.bits.dtype, got.ranks.dtype) == (torch.uint32, torch.int32)


@pytest.mark.parametrize("shape", [(0, 4), (10, 0), (0,)])
def test_nothing_gathers_to_nothing(device, shape):
    table = torch.zeros(shape, device=device)
    ids = torch.arange(shape[0], device=device)

    got = gather_rows(table, ids)

    assert got.shape == shape


def test_few_blocks_gather_many_rows(device):
    table = make_table(50, (4,), device=device)
    ids = torch.arange(200, device=device) % 50

    got = gather_rows(table, ids, max_blocks=1)

    assert torch.equal(got, table[ids])


def test_table_that_requires_grad_is_read(device):
    table = make_table(10, (4,), device=device).requires_grad_()

    got = gather_rows(table, torch.tensor(IDS, device=device))

    assert torch.equal(got, table.detach()[IDS])


@pytest.mark.parametrize("bad", [10, -1, 2**40])
def test_bad_ids_on_the_cpu_are_refused_before_anything_is_written(bad):
    table, out = make_table(10, (4,)), torch.full((2, 4), -77.0)

    with pytest.raises(IdError, match=rf"ids must lie in \[0, 10\), got {bad}"):
        gather_rows(table, torch.tensor([0, bad]), out=out)

    assert out.tolist() == [[-77.0] * 4] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("max_blocks", [None, 1], ids=["free", "capped"])
@pytest.mark.parametrize("width", [1, 3, 4, 25, 128])
@pytest.mark.parametrize("bad", [10, -1, 2**40])
@pytest.mark.parametrize("repeats", [1, 200], ids=["few", "many"])
def test_bad_ids_on_the_gpu_read_zeros_and_are_told(width, bad, max_blocks, repeats):
    table = make_table(10, (width,), device="cuda")
    ids = [*(repeats * IDS), bad, 1, -5, 2]
    errors = torch.full((1,), NO_POSITION, device="cuda")

    with poisoned_memory():
        got = gather_rows(table, torch.tensor(ids, device="cuda"), errors=errors, max_blocks=max_blocks)

    assert read_bytes(got).tolist() == expect_rows(table, ids)
    assert errors.item() == reference.find_first_bad(ids, 10) == 7 * repeats


@pytest.mark.parametrize(("ids", "error", "words"), [
    (torch.tensor([0.0]), ArgumentTypeError, "ids must have dtype int64 or int32, got torch.float32"),
    (torch.tensor([[0]]), ArgumentError, r"ids must have one dimension, got shape \(1, 1\)"),
    ([0], ArgumentTypeError, "ids must be a tensor, got list"),
])  # fmt: skip
def test_bad_ids_are_refused(ids, error, words):
    with pytest.raises(error, match=words):
        gather_rows(make_table(10, (4,)), ids)


@pytest.mark.parametrize(("out", "words"), [
    (torch.zeros(1, 4), r"out must be contiguous \(2, 4\) of torch.float32 on cpu, got \(1, 4\)"),
    (torch.zeros(2, 4, dtype=torch.float64), r"got \(2, 4\) of torch.float64"),
    (torch.zeros(2, 8)[:, ::2], r"out must be contiguous"),
])  # fmt: skip
def test_bad_out_is_refused(out, words):
    with pytest.raises(ArgumentError, match=words):
        gather_rows(make_table(10, (4,)), torch.tensor([0, 1]), out=out)


@pytest.mark.parametrize(("cold", "words"), [
    (torch.zeros(10, 5), r"cold must have the row \(4,\) of torch.float32 of hot, got \(5,\)"),
    (torch.zeros(10, 4, dtype=torch.float64), r"cold must have the row \(4,\) .* of torch.float64"),
    (torch.zeros(10, 8)[:, ::2], "hot and cold must be contiguous"),
])  # fmt: skip
def test_cold_rows_of_another_kind_are_refused(cold, words):
    directory = Directory.of(torch.tensor([2]), 10)

    with pytest.raises(ArgumentError, match=words):
        gather_rows(torch.zeros(1, 4), torch.tensor([0]), cold=cold, directory=directory)


def test_cold_rows_without_a_directory_are_refused():
    with pytest.raises(ArgumentError, match="directory must say which ids are hot where cold is given, got None"):
        gather_rows(torch.zeros(1, 4), torch.tensor([5]), cold=torch.zeros(10, 4))


@pytest.mark.parametrize(("table", "dtype", "words"), [
    (torch.zeros(5, 2), torch.float64, "dtype must be float32 over rows of float16, bfloat16, float8_e4m3fn, or "
                                       "torch.float32 as hot, got torch.float64"),
    (torch.zeros(5, 2, dtype=torch.float16), torch.bfloat16, "or torch.float16 as hot, got torch.bfloat16"),
    (torch.zeros(5, 2, dtype=torch.int16), torch.float32, "or torch.int16 as hot, got torch.float32"),
    (torch.zeros(5, 2).to(torch.float8_e4m3fn), torch.float32,
     r"exponents must be contiguous \(5,\) of torch.uint8 on cpu, got None"),
])  # fmt: skip
def test_rows_that_cannot_be_widened_are_refused(table, dtype, words):
    with pytest.raises(ArgumentError, match=words):
        gather_rows(table, torch.tensor([0]), dtype=dtype)


def test_exponents_of_other_rows_are_refused():
    with pytest.raises(ArgumentError, match=r"exponents must be contiguous \(5,\) .*, got \(4,\) of torch.uint8"):
        gather_rows(torch.zeros(5, 2).to(torch.float8_e4m3fn), torch.tensor([0]), dtype=torch.float32,
                    exponents=torch.zeros(4, dtype=torch.uint8))  # fmt: skip
