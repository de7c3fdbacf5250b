"""Hot rows follow the reads, and results stay right."""

import pytest
import torch

from pyg_direct import Feature
from pyg_direct.errors import ArgumentError
from pyg_direct.features.hot_rows import ReadCounts
from pyg_direct.ops.rows.gather_rows import Directory
from tests.features.contract import bytes_of, make_rows
from tests.poison import poisoned_memory


def test_rows_read_lately_are_chosen(device):
    counts = ReadCounts(10, 2, 0.5, device)

    times = [counts.note(torch.tensor(ids, device=device)) for ids in ([1, 2], [1, 2], [3, 3, 4], [3])]
    early = counts.choose(1).tolist()
    for ids in ([8, 9], [8, 9, 9]):
        counts.note(torch.tensor(ids, device=device))

    assert times == [False, True, False, True]
    assert early == [3]
    assert counts.choose(2).tolist() == [8, 9]


@pytest.mark.parametrize("bad", [10, -1, 2**40])
def test_what_is_no_id_counts_for_no_row(device, bad):
    counts = ReadCounts(10, 2, 0.5, device)

    counts.note(torch.tensor([bad, bad, 9], device=device))

    assert counts.choose(1).tolist() == [9]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.complex64, torch.bfloat16], ids=str)
def test_hot_rows_change_and_rows_stay_right(dtype):
    table = make_rows(1000, dtype=dtype)
    expected = bytes_of(table).clone()
    feature = Feature(device_cache_size="10%").from_cpu_tensor(table)
    feature.follow_reads(period=3)
    rates = []

    for step in range(30):
        # The rows that are read move up the table.
        ids = torch.randint(100, (400,), device="cuda") + 4 * step
        feature.count_served()
        got = feature.read(ids)
        rates.append(feature.hit_rate)
        assert torch.equal(bytes_of(got), expected[ids.cpu()])

    assert feature.num_hot_rows == 100
    # The rows that were hot at first would serve none of the last reads.
    assert min(rates[4:]) > 0.4


@pytest.mark.gpu
def test_reads_of_several_streams_see_the_rows_that_are_hot_for_them():
    table = torch.arange(50_000.0).view(-1, 1).repeat(1, 32)
    feature = Feature(device_cache_size="20%").from_cpu_tensor(table.clone())
    feature.follow_reads(period=2)
    streams = [torch.cuda.Stream() for _ in range(3)]

    for step in range(60):
        with torch.cuda.stream(streams[step % 3]):
            ids = torch.randint(10_000, (20_000,), device="cuda") + 600 * step
            got = feature[ids]
            assert torch.equal(got[:, 7], ids.float())


@pytest.mark.gpu
def test_rows_are_ready_for_every_stream_once_they_are_placed(monkeypatch):
    table, make = torch.arange(1000.0).view(-1, 1).repeat(1, 32), Directory.of

    def make_late(*args):
        torch.cuda._sleep(50_000_000)
        return make(*args)

    monkeypatch.setattr(Directory, "of", make_late)
    # The old contents might pass as well.
    with poisoned_memory():
        feature = Feature(device_cache_size="20%").from_cpu_tensor(table.clone())
    with torch.cuda.stream(torch.cuda.Stream()):
        ids = torch.arange(1000, device="cuda")
        got = feature[ids].cpu()

    assert torch.equal(got, table)


@pytest.mark.gpu
def test_updated_rows_are_read_after_a_change():
    feature = Feature(device_cache_size="20%").from_cpu_tensor(torch.zeros(40, 3))
    feature.follow_reads(period=1)
    feature[torch.tensor([30, 31], device="cuda")]

    feature.update_([30, 0], torch.ones(2, 3))

    assert feature[[30, 0, 31]].tolist() == [[1] * 3, [1] * 3, [0] * 3]


@pytest.mark.parametrize("cache", [0, "100%"])
def test_where_nothing_can_change_nothing_does(device, cache):
    table = make_rows()
    feature = Feature(device=device, device_cache_size=cache).from_cpu_tensor(table)

    feature.follow_reads(1)

    assert feature.stored.following is None
    assert torch.equal(bytes_of(feature[[3, 39]]), bytes_of(table)[[3, 39]])


@pytest.mark.parametrize(("options", "words"), [
    ({"period": -1}, "period must be an integer of at least 0, got -1"), ({"period": 1.5}, "got 1.5"),
    ({"fade": 1.2}, r"fade must lie in \[0, 1\], got 1.2"),
])  # fmt: skip
def test_what_makes_no_sense_is_named(device, options, words):
    feature = Feature(device=device).from_cpu_tensor(make_rows())

    with pytest.raises(ArgumentError, match=words):
        feature.follow_reads(**options)


def test_an_empty_feature_follows_nothing():
    with pytest.raises(ArgumentError, match="holds no rows yet"):
        Feature(device="cpu").follow_reads()
