"""Groups are chosen by their shared edges, and the choice is the best of all nested ones."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st

from pyg_direct.dynamic import stream
from pyg_direct.dynamic.conv_operators import Factors
from pyg_direct.dynamic.group_tuner import Speeds, choose_groups, expect_options, find_values
from pyg_direct.dynamic.nn import TGCN
from pyg_direct.ops.snapshots import aggregate
from pyg_direct.ops.snapshots.slice_csr import unite
from tests.dynamic.stream.test_stream import make_list

# An edge costs as much as its row is wide from 16 numbers on, and launches little.
SPEEDS = Speeds(((4e-11, 4e-11, 4e-11, 16e-11, 64e-11, 256e-11),) * 3, 0.0, 1e-6, 1e-6, 5e10)


def make_keys(count, change, size=100_000):
    keys = torch.arange(size)
    return [torch.cat([keys[: int(size * (1 - change))], size * (t + 1) + keys[: int(size * change)]])
            for t in range(count)]  # fmt: skip


def test_all_that_is_shared_is_read_once():
    (option,) = choose_groups(make_keys(8, 0.0), 16, SPEEDS)

    assert (option.last - option.first, option.overlap_rate) == (8, 1)
    assert option.seconds < 4 * choose_groups(make_keys(1, 0.0), 16, SPEEDS)[0].seconds


def test_what_shares_nothing_is_not_read_for_others():
    options = choose_groups(make_keys(8, 1.0), 16, SPEEDS)

    # As wide as one snapshot: apart, or as exclusives in one structure, which saves launches.
    assert all(option.form == "split" or option.last - option.first == 1 for option in options)
    apart = 8 * choose_groups(make_keys(1, 0.0), 16, SPEEDS)[0].seconds
    assert sum(option.seconds for option in options) <= apart


@given(count=st.integers(1, 8), change=st.floats(0, 1), channels=st.integers(1, 64))
def test_choice_is_the_best_of_all_nested_ones(count, change, channels):
    keys = make_keys(count, change, 1000)
    cheapest = {}
    for first, size in itertools.product(range(count), (1, 2, 4, 8)):
        last = min(first + size, count)
        if first % size == 0:
            part = keys[first:last]
            options = expect_options(unite(part), sum(map(len, part)), channels, first, SPEEDS)
            cheapest[first, last] = min(option.seconds for option in options)

    def best(first, last):
        if last - first == 1:
            return cheapest[first, last]
        half = 1
        while 2 * half < last - first:
            half *= 2
        return min(cheapest[first, last], best(first, first + half) + best(first + half, last))

    chosen = choose_groups(keys, channels, SPEEDS)

    assert sum(option.seconds for option in chosen) == pytest.approx(best(0, count))
    assert [option.first for option in chosen] == [0, *(option.last for option in chosen[:-1])]


def test_speeds_lie_between_those_measured():
    table = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0), (2.0, 4.0, 8.0, 16.0, 32.0, 64.0), (2.0, 4.0, 8.0, 16.0, 64.0, 256.0)
    speeds = Speeds(table, 0, 0, 0, 0)

    widths = (0, 1, 2, 16, 256, 512, 1024, 2048)
    assert [speeds.per_edge(width) for width in widths] == pytest.approx([1, 1, 2**0.5, 4, 16, 2**4.5, 32, 64])
    # Of 128 KiB, 1 and 16 MiB, and beyond.
    assert [speeds.per_edge(16, 2**power) for power in (10, 17, 20, 24, 40)] == pytest.approx([4, 4, 8, 8, 8])
    assert speeds.per_edge(256, 2**22) == pytest.approx(32 * 2**0.5)


def test_little_work_is_one_threads():
    many, few = (
        replace(SPEEDS, few_factor=factor).add_up(count, 16, 0) for factor, count in ((3, 20_000), (3, 10_000))
    )

    # 160,000 products are left to one thread, twice as many are not.
    assert (many, few) == pytest.approx((20_000 * 4e-11, 3 * 10_000 * 4e-11))


def test_rows_that_sums_are_added_to_count():
    speeds, union = replace(SPEEDS, bytes_per_second=0.0), unite(make_keys(2, 0.5))

    (mask, split), (free_mask, free_split) = (
        expect_options(union, 200_000, 16, 0, speeds, num_nodes=n) for n in (10**9, 0)
    )

    # Nearly every edge has its own row, as wide as the edge's numbers.
    assert mask.seconds - free_mask.seconds == pytest.approx(150_000 * speeds.per_edge(16 * 4 / 3), rel=0.05)
    rows = 50_000 * speeds.per_edge(32) + 100_000 * speeds.per_edge(16)
    assert split.seconds - free_split.seconds == pytest.approx(rows, rel=0.05)


def test_what_edges_are_asked_for_counts():
    slow = Speeds(SPEEDS.seconds_of_edge, 1e-9, 1e-6, 1e-6, 0.0)
    union = unite(make_keys(4, 0.0))

    (mask, split), (free, _) = (
        expect_options(union, 400_000, 4, 0, speeds) for speeds in (slow, replace(slow, test_seconds=0))
    )

    # Each of 100,000 edges is looked for in four snapshots; edges of all snapshots are not, and leave no second
    # structure.
    assert mask.seconds - free.seconds == pytest.approx(4e-4)
    assert split.seconds == pytest.approx(free.seconds)


@pytest.mark.parametrize(("changed", "expected"), [(0, "shared"), (1, "move"), (49, "move"), (51, "stacked"),
                                                   (100, "stacked")])  # fmt: skip
def test_weights_of_their_own_are_found(changed, expected):
    before = Factors(torch.arange(0, 200, 2), torch.ones(100), None, None, None)
    # Edges that only one snapshot has do not count.
    keys = torch.cat([before.keys, torch.arange(201, 401)])
    after = before._replace(keys=keys, weight=torch.where(torch.arange(300) < changed, 2.0, 1.0))

    assert find_values([before, after]) == find_values([after, before]) == expected
    assert find_values([before._replace(weight=None), after]) == expected


def test_nothing_is_stacked_without_weights_or_edges():
    none = Factors(torch.empty(0, dtype=torch.int64), None, None, None, None)
    ones = none._replace(keys=torch.arange(5))

    assert find_values([none, ones, ones, ones]) == "ones"
    assert find_values([none, ones, ones, none._replace(weight=torch.ones(0)), ones]) == "shared"


def test_rows_out_of_caches_cost_more():
    speeds = Speeds(((4e-11,) * 6, (4e-11,) * 6, (4e-8,) * 6), 0.0, 1e-6, 1e-6, 0.0)

    def find_sizes(num_nodes):
        return [o.last - o.first for o in choose_groups(make_keys(8, 0.0), 16, speeds, num_nodes=num_nodes)]

    # Rows of one snapshot of 16,000 nodes are 1 MB: rows of eight cost more than they share.
    assert find_sizes(2_000) == [8]
    assert find_sizes(16_000) == [1] * 8


def test_choices_are_told(monkeypatch):
    monkeypatch.setattr("pyg_direct.dynamic.group_choice.find_speeds", lambda device: SPEEDS)
    given, layer = stream(make_list(8), "cpu"), TGCN(3, 4)

    for snapshot in given:
        layer(snapshot.x, snapshot.edge_index, snapshot.edge_attr)

    summary = given.plan.summary()
    assert "snapshots 0 to 7" in summary
    assert "a weight an edge" in summary
    assert "overlap" in summary


def test_what_is_done_whatever_the_edges_counts():
    speeds = replace(SPEEDS, seconds_of_number=(1e-9, 1e-9, 4e-9), bytes_per_second=0.0)
    union = unite(make_keys(1, 0.0))

    # 64 kB of rows, and 64 MB.
    for num_nodes, seconds in ((1000, 1e-9), (10**6, 4e-9)):
        (with_rows,), (free,) = (
            expect_options(union, 100_000, 16, 0, known, num_nodes=num_nodes)
            for known in (speeds, replace(speeds, seconds_of_number=(0.0,) * 3))
        )
        assert with_rows.seconds - free.seconds == pytest.approx(num_nodes * 16 * seconds)
    assert speeds.per_number(2**22) == pytest.approx(2e-9)


def test_what_is_made_on_the_device_is_not_sent():
    union = unite(make_keys(1, 0.0))

    (sent,), (there,) = (
        expect_options(union, 100_000, 16, 0, replace(SPEEDS, send_seconds=1e-3, bytes_per_second=rate))
        for rate in (5e10, 0.0)
    )

    assert sent.seconds - there.seconds == pytest.approx(1e-3 + 5e5 / 5e10)


def test_a_second_structure_is_sent_too():
    union = unite(make_keys(2, 0.5))

    (mask, split), (free_mask, free_split), (_, there) = (
        expect_options(union, 200_000, 16, 0, replace(SPEEDS, send_more_seconds=more, bytes_per_second=rate))
        for more, rate in ((1e-3, 5e10), (0.0, 5e10), (1e-3, 0.0))
    )

    assert mask.seconds == free_mask.seconds
    assert split.seconds - free_split.seconds == pytest.approx(1e-3)
    # Structures made on the device are not sent.
    assert there.seconds < free_split.seconds
    # If all edges are shared, there is none.
    alike = unite(make_keys(2, 0.0))
    sent = [expect_options(alike, 200_000, 16, 0, replace(SPEEDS, send_more_seconds=more))[1] for more in (1e-3, 0.0)]
    assert sent[0].seconds == sent[1].seconds


def test_a_device_works_while_the_host_asks_for_more():
    union = unite(make_keys(1, 0.0))
    slow_host, slow_device = (
        replace(SPEEDS, call_seconds=call, bytes_per_second=0.0, is_queued=True) for call in (1.0, 1e-6)
    )
    work = 100_000 * SPEEDS.per_edge(16)

    (by_host,), (by_device,), (apart,) = (
        expect_options(union, 100_000, 16, 0, known)
        for known in (slow_host, slow_device, replace(slow_device, is_queued=False))
    )

    # A fifth of the host's time is not hidden.
    assert (by_host.seconds, by_device.seconds) == pytest.approx((1.2, work + 2e-7))
    assert apart.seconds == pytest.approx(work + 1e-6)


def test_threads_begin_once_for_each_structure():
    speeds = replace(SPEEDS, threads_seconds=1e-3)

    # As in one thread, but for the beginning.
    assert speeds.add_up(20_000, 16, 0) - SPEEDS.add_up(20_000, 16, 0) == pytest.approx(1e-3)
    assert speeds.add_up(10_000, 16, 0) == SPEEDS.add_up(10_000, 16, 0)


def test_numbers_that_snapshots_lack_are_paid_for_under_a_mask():
    speeds = replace(SPEEDS, bytes_per_second=0.0, scan_seconds=((5e-12, 2e-11), (1e-11, 4e-11)))
    apart, alike = unite(make_keys(8, 1.0)), unite(make_keys(8, 0.0))
    edges = apart.keys.numel()

    blind = replace(speeds, scan_seconds=())

    masks = [expect_options(apart, edges, 8, 0, known)[0].seconds for known in (speeds, blind)]

    # An edge is in one of eight, and has 64 numbers with those of the others.
    assert masks[0] - masks[1] == pytest.approx(edges * 4e-11, rel=0.01)
    # If all snapshots have all edges no read is wasted.
    given = expect_options(alike, 8 * alike.keys.numel(), 8, 0, speeds)
    assert given == expect_options(alike, 8 * alike.keys.numel(), 8, 0, blind)
    # And splits read only existing edges.
    assert expect_options(apart, edges, 8, 0, speeds)[1] == expect_options(apart, edges, 8, 0, blind)[1]
    assert [speeds.scan(width, 1 / 8) for width in (8, 16, 32, 512)] == pytest.approx([5e-12, 1e-11, 2e-11, 32e-11])
    # Half as much if seven of eight have an edge, the whole as soon as one in 64 lacks it, and less before.
    assert [speeds.scan(16, share) for share in (0.5, 7 / 8, 63 / 64, 127 / 128, 1)] == pytest.approx(
        [7.5e-12, 5e-12, 5e-12, 2.5e-12, 0]
    )


def test_scans_over_csr_take_what_they_took_there(monkeypatch):
    slices, csr = ((1e-11,) * 2,) * 2, ((5e-12, 1e-11, 2e-11, 8e-11),) * 2
    speeds = replace(SPEEDS, scan_seconds=slices, scan_csr_seconds=csr, bytes_per_second=0.0)
    blind = replace(speeds, scan_seconds=(), scan_csr_seconds=())
    apart = unite(make_keys(8, 1.0))
    edges = apart.keys.numel()

    def find_scans(many):
        for name in ("MANY_MASKED", "MANY_SUMS"):
            monkeypatch.setattr(aggregate, name, many)
        sides = (expect_options(apart, edges, 32, 0, known, num_nodes=9)[0].seconds for known in (speeds, blind))
        return next(sides) - next(sides)

    assert find_scans(1) == pytest.approx(edges * 2e-11, rel=0.01)
    # As wide as four times the widest that was measured.
    assert find_scans(2**60) == pytest.approx(edges * 4e-11, rel=0.01)
    widths = (8, 16, 64, 256, 512, 2048)
    assert [speeds.scan(n, 1 / 8, True) for n in widths] == pytest.approx([25e-13, 5e-12, 1e-11, 2e-11, 4e-11, 16e-11])


@pytest.mark.parametrize(("values", "mask", "split"), [("ones", 1, 1), ("shared", 10, 10), ("move", 100, 10),
                                                       ("stacked", 100, 100)])  # fmt: skip
def test_whole_groups_take_longer_than_their_parts_as_was_tried(values, mask, split):
    tables = [tuple((k * row, 4 * k * row, 1.0, 1.0, 1.0) for row in range(1, 8)) for k in (1.0, 10.0, 100.0)]
    speeds = replace(SPEEDS, call_seconds=0.0, launch_seconds=0.0, bytes_per_second=0.0)

    for size, rows in ((1, [1]), (2, [2, 5]), (3, [3, 6]), (4, [3, 6]), (8, [4, 7])):
        union = unite(make_keys(size, 0.5))
        plain, longer = (expect_options(union, size * 100_000, 4, 0, known, values)
                         for known in (speeds, replace(speeds, factors=tuple(tables))))  # fmt: skip

        # 4 numbers lie in the middle of 2 and 8.
        assert [b.seconds / a.seconds for a, b in zip(plain, longer, strict=True)] == pytest.approx(
            [2.0 * tried * row for tried, row in zip((mask, split), rows, strict=False)]
        )


def test_a_second_structure_reads_results_again():
    speeds, union = replace(SPEEDS, bytes_per_second=0.0), unite(make_keys(2, 0.5))
    edges = union.num_snapshots * 100_000

    (mask, split), (other_mask, other_split) = (
        expect_options(union, edges, 4, 0, replace(speeds, again_seconds=again), num_nodes=1000)
        for again in (1e-9, 0.0)
    )

    assert mask == other_mask
    assert split.seconds - other_split.seconds == pytest.approx(1e-9 * 1000 * 2 * 4)


@pytest.mark.parametrize("scan_seconds", [(), ((1e-11, 4e-11),) * 2])
def test_snapshots_without_edges_take_what_is_asked_for(scan_seconds):
    (option,) = choose_groups(make_keys(8, 0.0, 0), 16, replace(SPEEDS, scan_seconds=scan_seconds))

    assert (option.first, option.last, option.overlap_rate) == (0, 8, 1)
    assert 0 < option.seconds < 1e-4


@pytest.mark.parametrize("field", ["convert_seconds", "csr_seconds"])
@pytest.mark.parametrize(("channels", "weights", "many", "structures"), [
    (4, 0, 1, (0, 0)), (8, 0, 1, (1, 1)), (32, 0, 1, (1, 2)), (32, 0, 2**40, (0, 0)),
    (4, 1, 1, (0, 0)), (8, 1, 1, (1, 0)), (32, 1, 1, (1, 1)), (128, 1, 1, (1, 2)),
])  # fmt: skip
def test_wide_rows_of_many_edges_take_what_csr_does(channels, weights, many, structures, field, monkeypatch):
    for name in ("MANY_NUMBERS", "MANY_MASKED", "MANY_SUMS"):
        monkeypatch.setattr(aggregate, name, many)
    union = unite(make_keys(2, 0.5))

    quick, slow = (
        expect_options(
            union,
            200_000,
            channels,
            0,
            replace(SPEEDS, **{field: seconds}, is_queued=False),
            "shared" if weights else "ones",
            num_nodes=1000,
        )
        for seconds in (0.0, 1e-3)
    )

    # Edges that both have are made CSR from 16 numbers on in all, or 32 with weights; under a mask from 16; and others
    # of 16 in one, or 128.
    more = [b.seconds - a.seconds for a, b in zip(quick, slow, strict=True)]
    assert more == pytest.approx([count * 1e-3 for count in structures])


def test_ids_that_leave_no_bits_for_snapshots_are_not_made_csr_under_a_mask(monkeypatch):
    for name in ("MANY_NUMBERS", "MANY_MASKED", "MANY_SUMS"):
        monkeypatch.setattr(aggregate, name, 1)
    union = unite(make_keys(2, 0.5))

    def find_masks(num_nodes):
        sides = (expect_options(union, 200_000, 32, 0, replace(SPEEDS, csr_seconds=s), num_nodes=num_nodes)[0].seconds
                 for s in (1e-3, 0.0))  # fmt: skip
        return next(sides) - next(sides)

    assert [find_masks(2**30), find_masks(2**30 + 1)] == pytest.approx([1e-3, 0.0])


def test_a_gpu_takes_some_time_for_each_call_and_structure():
    union = unite(make_keys(2, 0.5))
    (mask, split), (slow_mask, slow_split) = (
        expect_options(union, 200_000, 16, 0, replace(SPEEDS, floor_seconds=call, floor_more_seconds=more))
        for call, more in ((0.0, 0.0), (1e-3, 1e-4))
    )

    assert slow_mask.seconds - mask.seconds == pytest.approx(1e-3)
    assert slow_split.seconds - split.seconds == pytest.approx(1.1e-3)
