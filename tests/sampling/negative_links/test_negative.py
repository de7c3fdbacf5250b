"""Negative links: equal to the reference on every device; by weight, in time, and never an edge if so asked."""

import pytest
import torch
from hypothesis import example, given, strategies as st

from pyg_direct.errors import ArgumentError
from pyg_direct.sampling import negative_links
from pyg_direct.sampling.negative_links import EdgeSet, Nodes, check_weight, draw_negatives
from tests.reference import negative as reference

KEY = 2**63 + 99
SOURCE_TIME, TARGET_TIME = [5, 1, 9, 1, 7, 3], [4, 4, 0, 8, 2, 6, 6, 30]
UNTIL = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 100]
WEIGHT = [0.0, 2.5, 0.0, 0.5, 1.0, 0.0, 4.0, 0.25]


def draw(device, count, *, time=(None, None), weight=(None, None), until=None, edges=None, sources=None):
    """Pairs, and what was said of them."""
    weight = [None if w is None else torch.tensor(w, dtype=torch.float64) for w in weight]
    ends = [Nodes(size, w, None if t is None else torch.tensor(t), device)
            for size, t, w in zip((6, 8), time, weight, strict=True)]  # fmt: skip
    until = None if until is None else torch.tensor(until, device=device)
    if sources is not None:
        sources = torch.tensor(sources, device=device)
    if edges is not None:
        first, second = torch.tensor(sorted(edges), device=device).t()
        edges = EdgeSet(first, second, 6, 8)
    drawn = draw_negatives(count, KEY, ends[1], sources=ends[0] if sources is None else sources, until=until,
                           edges=edges, device=device)  # fmt: skip
    return list(zip(drawn.sources.tolist(), drawn.targets.tolist(), strict=True)), drawn


@pytest.mark.parametrize("weight", [(None, None), (None, WEIGHT), (WEIGHT[:6], WEIGHT)])
@pytest.mark.parametrize("time", [None, (SOURCE_TIME, TARGET_TIME), (None, TARGET_TIME)])
def test_pairs_are_those_of_the_reference(device, time, weight):
    until = None if time is None else UNTIL
    options = {"time": time or (None, None), "until": until, "weight": weight}

    pairs, _ = draw(device, 11, **options)

    assert pairs == reference.draw_negatives(11, KEY, 6, 8, **options)


def test_targets_of_given_sources_are_those_of_the_reference(device):
    sources = [0, 5, 5, 2, 1]

    pairs, _ = draw(device, 5, sources=sources)

    assert pairs == reference.draw_negatives(5, KEY, 6, 8, sources=sources)


def test_strict_pairs_are_those_of_the_reference_and_no_edges(device):
    edges = {(s, t) for s in range(6) for t in range(8) if (s + t) % 4}

    pairs, drawn = draw(device, 40, edges=edges)

    assert pairs == reference.draw_negatives(40, KEY, 6, 8, edges=edges)
    assert edges.isdisjoint(pairs)
    assert drawn.num_edges == 0


def test_it_says_how_many_are_edges_when_nothing_else_is_there(device):
    edges = {(2, t) for t in range(8)}

    _, drawn = draw(device, 3, edges=edges, sources=[2, 1, 2])

    assert drawn.num_edges == 2


def test_nodes_are_never_later_than_the_link_and_the_earliest_stands_for_none(device):
    pairs, drawn = draw(device, 11, time=(None, TARGET_TIME), until=[-1, *UNTIL[1:]])

    assert pairs[0][1] == TARGET_TIME.index(0)
    assert drawn.num_untimely == 1
    assert all(TARGET_TIME[target] <= until for (_, target), until in zip(pairs[1:], UNTIL[1:], strict=True))


def test_weights_are_chances(device):
    nodes = Nodes(8, torch.tensor(WEIGHT), None, device)

    drawn, _ = nodes.draw(torch.arange(20_000, device=device), KEY, 0, None)

    shares = torch.bincount(drawn.cpu(), minlength=8) / 20_000
    # Five standard deviations.
    assert torch.allclose(shares, torch.tensor(WEIGHT) / sum(WEIGHT), atol=5 * (0.25 / 20_000) ** 0.5)
    assert shares[[0, 2, 5]].tolist() == [0.0] * 3


@pytest.mark.parametrize("factor", [2.0**-1072, 2.0**1021])
@pytest.mark.parametrize("time", [None, (SOURCE_TIME, TARGET_TIME)])
def test_weights_as_small_and_as_large_as_any_are_chances_too(device, factor, time):
    options = {"time": time or (None, None), "until": None if time is None else UNTIL}
    weight = WEIGHT[:6], WEIGHT

    pairs, _ = draw(device, 11, **options, weight=[[w * factor for w in weights] for weights in weight])

    assert pairs == draw(device, 11, **options, weight=weight)[0]


def test_a_small_weight_beside_a_large_one_is_one():
    chances = check_weight(torch.tensor([5e-324, 0.0, 1.7e308], dtype=torch.float64), 3)

    assert (chances > 0).tolist() == [True, False, True]


def test_a_set_of_edges_knows_its_pairs(device):
    edges = EdgeSet(torch.tensor([3, 0, 3], device=device), torch.tensor([1, 7, 1], device=device), 6, 8)

    asked = edges.contains(torch.tensor([3, 1, 0, 5], device=device), torch.tensor([1, 3, 7, 7], device=device))

    assert asked.tolist() == [True, False, True, False]


PAIRS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12)


@given(PAIRS, PAIRS, st.booleans(), st.booleans())
@example([(1, 2), (2, 1), (2, 1), (4, 4)], [(3, 0), (3, 3)], False, True)
@example([(4, 4)], [(3, 0)], False, True)
@example([(1, 2), (2, 1), (0, 5)], [(3, 0)], False, True)
def test_links_are_there_turned_round_where_all_edges_go_both_ways(pairs, links, both, is_one_type):
    pairs = [*pairs, *((t, s) for s, t in pairs)] if both else pairs
    edges, ends = (torch.tensor(own, dtype=torch.int64).view(-1, 2).t() for own in (pairs, links))
    every = torch.cartesian_prod(torch.arange(6), torch.arange(6))

    avoided = EdgeSet(*edges, 6, 6).with_links(*ends, is_one_type=is_one_type)

    found = set(map(tuple, every[avoided.contains(*every.t())].tolist()))
    assert found == reference.list_avoided(pairs, links, is_one_type)


def test_edges_in_pieces_and_parts_weigh_what_all_do(device, monkeypatch):
    edges = torch.randint(0, 40, (2, 300), generator=torch.Generator().manual_seed(0)).to(device)
    both = torch.cat([edges, edges.flip(0)], 1)
    is_low = both[1] < 17

    def weigh(*parts):
        return negative_links.Balance.add(EdgeSet(*part, 40, 40).weigh() for part in parts)

    whole = weigh(both), weigh(edges)
    monkeypatch.setattr(negative_links, "_EDGES_AT_ONCE", 7)

    assert [balance.is_even for balance in whole] == [True, False]
    assert (weigh(both), weigh(edges)) == whole
    assert weigh(both[:, is_low], both[:, ~is_low]) == whole[0]
    parts = [EdgeSet(*both[:, chosen], 40, 40).parts[0] for chosen in (is_low, ~is_low)]
    assert EdgeSet(*both, 40, 40).with_parts(parts).weigh() == whole[0]
    assert not weigh(both[:, is_low]).is_even


@pytest.mark.parametrize(
    ("weight", "words"),
    [([1.0], r"weights of shape \(2,\), got \(1,\)"), ([1.0, -0.5], "at least 0, got -0.5"),
     ([1.0, float("nan")], "finite weights of at least 0, got nan"), ([0.0, 0.0], "a weight above 0, got none")],
)  # fmt: skip
def test_weights_that_are_no_chances_are_refused(weight, words):
    with pytest.raises(ArgumentError, match=words):
        check_weight(torch.tensor(weight), 2)


def test_nothing_can_be_drawn_from_nothing():
    with pytest.raises(ArgumentError, match="needs 1 to 2147483647 nodes to draw from, got 0"):
        Nodes(0, None, None, torch.device("cpu"))


def test_more_pairs_than_an_integer_numbers_are_refused():
    none = torch.empty(0, dtype=torch.int64)

    with pytest.raises(ArgumentError, match=r"less than 2\*\*63 pairs, got 1099511627776 x 8388608 nodes"):
        EdgeSet(none, none, 2**40, 2**23)
