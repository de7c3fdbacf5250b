import pytest
import torch

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.ops.sampling.draw_random import derive_key, draw_below, draw_bits, draw_until, permute
from tests.poison import poisoned_memory
from tests.reference import draw as reference

ITEMS = [0, 1, -1, 5, 5, 2**31, 2**40 + 3, 2**62, -(2**63)]


def as_unsigned(bits):
    return [value % 2**64 for value in bits.tolist()]


@pytest.mark.parametrize(("key", "slot"), [(0, 0), (7, 3), (2**64 - 1, 2**40), (2**63, 2**63 - 1)])
def test_bits_match_the_reference(device, key, slot):
    expected = [reference.draw(key, item, slot) for item in ITEMS]

    with poisoned_memory():
        got = draw_bits(torch.tensor(ITEMS, device=device), key=key, slot=slot)

    assert got.dtype == torch.int64
    assert as_unsigned(got) == expected


def test_bits_of_many_items_match_the_reference(device):
    items = list(range(300))

    got = draw_bits(torch.tensor(items, device=device), key=9)

    assert as_unsigned(got) == [reference.draw(9, item, 0) for item in items]


def test_narrow_items_draw_as_wide_ones(device):
    items = torch.tensor([3, 0, 2**31 - 1], device=device)

    narrow = draw_bits(items.int(), key=1)

    assert torch.equal(narrow, draw_bits(items, key=1))


def test_no_items_draw_nothing(device):
    got = draw_bits(torch.empty(0, dtype=torch.int64, device=device), key=1)

    assert got.shape == (0,)


def test_strided_items_draw_by_value(device):
    items = torch.arange(8, device=device)

    got = draw_bits(items[::2], key=3)

    assert torch.equal(got, draw_bits(items, key=3)[::2])


@pytest.mark.parametrize("count", [0, 1, 2, 57])
@pytest.mark.parametrize("key", [0, 2**64 - 1])
def test_permutation_matches_the_reference(device, count, key):
    got = permute(count, key=key, device=device)

    assert got.device.type == "cpu"
    assert got.tolist() == reference.permute(count, key)
    assert sorted(got.tolist()) == list(range(count))


@pytest.mark.parametrize("bound", [1, 7, 2**31 + 5, 2**62])
def test_integers_below_a_bound_match_the_reference(device, bound):
    items = torch.tensor([0, 1, 5, 2**62])

    got = draw_below(items.to(device), bound, key=2**64 - 3, slot=4)

    assert got.tolist() == [reference.draw_below(2**64 - 3, item, 4, bound) for item in items.tolist()]


def test_a_bound_below_one_is_refused():
    with pytest.raises(ArgumentError, match="bound must be at least 1, got 0"):
        draw_below(torch.arange(3), 0, key=1)


def test_permutations_of_other_keys_differ():
    orders = {tuple(permute(30, key=key).tolist()) for key in range(20)}

    assert len(orders) == 20


def test_derived_keys_match_the_reference():
    got = [derive_key(2**64 - 1, 2**63 + 1, number) for number in range(3)]

    assert got == [reference.draw(2**64 - 1, 2**63 + 1, number) for number in range(3)]


@pytest.mark.parametrize(("key", "error", "words"), [
    (-1, ArgumentError, r"key must lie in \[0, 2\*\*64\), got -1"),
    (2**64, ArgumentError, r"key must lie in \[0, 2\*\*64\), got 18446744073709551616"),
    (1.0, ArgumentTypeError, r"key must be an integer, got 1\.0"),
    (True, ArgumentTypeError, "key must be an integer, got True"),
])  # fmt: skip
def test_bad_keys_are_refused(device, key, error, words):
    items = torch.arange(3, device=device)

    with pytest.raises(error, match=words):
        draw_bits(items, key=key)


@pytest.mark.parametrize(("items", "error", "words"), [
    (torch.zeros(2), ArgumentTypeError, "items must have dtype int64 or int32, got torch.float32"),
    (torch.zeros(2, 2, dtype=torch.int64), ArgumentError, r"items must have one dimension, got shape \(2, 2\)"),
    ([1, 2], ArgumentTypeError, "items must be a tensor, got list"),
])  # fmt: skip
def test_bad_items_are_refused(items, error, words):
    with pytest.raises(error, match=words):
        draw_bits(items, key=1)


def test_those_are_drawn_that_are_there_by_a_time(device):
    times, order, until = [-5, 0, 0, 3, 9], [4, 2, 0, 1, 3], [-6, -5, 0, 2, 3, 8, 9, 2**62]

    with poisoned_memory():
        got, is_timely = draw_until(
            torch.arange(len(until), device=device),
            torch.tensor(times, device=device),
            torch.tensor(order, device=device),
            torch.tensor(until, device=device),
            key=2**64 - 3,
            slot=4,
        )

    bounds = [sum(time <= latest for time in times) for latest in until]
    assert got.tolist() == [order[reference.draw_below(2**64 - 3, item, 4, max(bound, 1))]
                            for item, bound in enumerate(bounds)]  # fmt: skip
    assert is_timely.tolist() == [bound > 0 for bound in bounds]
    assert is_timely.dtype == torch.bool
