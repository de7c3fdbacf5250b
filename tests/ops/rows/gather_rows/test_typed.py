import numpy as np
import pytest
import torch

from pyg_direct.errors import IdError
from pyg_direct.kernels.batch_counters import NO_POSITION
from pyg_direct.ops.rows.gather_rows import TypedReader, fits_typed, gather_rows, list_layout
from tests.poison import poisoned_memory

# Dtype and shape of a row.
FORMS = [(torch.float32, (64,)), (torch.float32, (4,)), (torch.float64, (6,)), (torch.int64, ()), (torch.bool, ()),
         (torch.int16, ()), (torch.float32, (1,)), (torch.uint8, (48,)), (torch.complex128, ())]  # fmt: skip
SIZES = [40, 7, 1, 90]


def make_tables(form, device):
    dtype, row = form
    values = [torch.randint(0, 2 if dtype == torch.bool else 100, (size, *row)) for size in SIZES]
    return [(value + (dtype != torch.bool) * number).to(dtype).to(device) for number, value in enumerate(values)]


def make_errors(device):
    pinned = device.type == "cuda" and torch.cuda.is_available()
    return torch.full((1,), NO_POSITION, dtype=torch.int64, pin_memory=pinned)


def read(tables, lists, device, errors):
    """Read rows of each table by ids that stand in one list with ids of another type between them."""
    others = torch.full((5,), 3)
    ids = torch.cat([torch.cat([others, own]) for own in lists]).to(device)
    counts = np.array([len(own) for own in lists])
    begins = np.cumsum(counts + 5) - counts
    reader = TypedReader(tables, errors)
    layout = torch.tensor(list_layout(begins.tolist(), counts.tolist()), device=device)
    with poisoned_memory():
        whole = reader.read(ids, layout, int(counts.sum()))
    return whole, torch.unsafe_split_with_sizes(whole, counts.tolist())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("counts", [(300, 0, 17, 5), (0, 0, 0, 1), (1, 2, 3, 0)])
def test_rows_are_those_of_each_table(device, form, counts):
    tables = make_tables(form, device)
    lists = [torch.randint(size, (count,)) for size, count in zip(SIZES, counts, strict=True)]

    whole, parts = read(tables, lists, device, make_errors(device))

    for table, own, rows in zip(tables, lists, parts, strict=True):
        assert (rows.dtype, rows.is_contiguous()) == (table.dtype, True)
        assert torch.equal(rows, gather_rows(table, own.to(device)))
    assert torch.equal(whole, torch.cat(list(parts)))


def test_no_ids_give_no_rows(device):
    tables = make_tables(FORMS[0], device)

    _, parts = read(tables, [torch.empty(0, dtype=torch.int64)] * 4, device, make_errors(device))

    assert [rows.shape for rows in parts] == [(0, 64)] * 4


def test_writes_to_the_rows_of_a_type_are_counted_for_it_alone(device):
    _, (first, second, *_) = read(make_tables(FORMS[1], device), [torch.tensor([0])] * 4, device, make_errors(device))

    first.add_(1)

    assert (first._version, second._version) == (1, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("form", [FORMS[0], FORMS[3]])
def test_an_id_out_of_range_gives_zeros_and_is_told(form):
    device, errors = torch.device("cuda"), make_errors(torch.device("cuda"))
    tables = [table + 1 for table in make_tables(form, device)]

    _, parts = read(tables, [torch.tensor([3]), torch.tensor([2, 7]), torch.tensor([0]), torch.tensor([-1])], device,
                    errors)  # fmt: skip
    torch.cuda.synchronize()

    assert errors.tolist() == [2]
    for rows in (parts[1][1], parts[3][0]):
        assert not rows.any()
    assert parts[0].all()


@pytest.mark.parametrize("bad", [7, -1])
def test_an_id_out_of_range_is_told_at_once_on_a_cpu(bad):
    tables = make_tables(FORMS[0], torch.device("cpu"))
    lists = [torch.tensor([3]), torch.tensor([2, bad]), torch.tensor([0]), torch.tensor([-1])]

    with pytest.raises(IdError, match=rf"ids must lie in \[0, 7\), got {bad}"):
        read(tables, lists, torch.device("cpu"), None)


@pytest.mark.parametrize(("dtype", "row", "fits"), [(torch.float32, (64,), True), (torch.float32, (50,), False),
                                                    (torch.int64, (), True), (torch.uint8, (3,), False),
                                                    (torch.float32, (0,), False)])  # fmt: skip
def test_fitting_rows_are_told(dtype, row, fits):
    assert fits_typed(torch.zeros(5, *row, dtype=dtype)) == fits


def test_strided_tables_do_not_fit():
    assert not fits_typed(torch.zeros(5, 8)[:, ::2])
