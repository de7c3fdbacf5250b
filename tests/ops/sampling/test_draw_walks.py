"""Walks equal the reference on every device, and node2vec's steps have the chances of the paper."""

import math
import threading
from collections import Counter
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from pyg_direct.compiler.jit import SIMULATED
from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError
from pyg_direct.kernels.sampling import walks as kernels
from pyg_direct.ops.sampling import draw_walks
from pyg_direct.ops.sampling.draw_walks import BoundsCheck, walk, walk_along
from pyg_direct.ops.sampling.find_induced import NeighborLists
from tests.reference import walks as reference

BIASES = [(1.0, 1.0), (0.25, 4.0), (4.0, 0.25), (1e9, 1e-3), (1e-12, 3.0)]


def make_lists(rows, device, dtype=torch.int32, step=1):
    indptr = torch.tensor(np.cumsum([0, *map(len, rows)]), device=device)
    neighbors = torch.tensor([node for row in rows for node in row], dtype=dtype, device=device)
    if step == 2:
        neighbors = torch.stack([neighbors, torch.full_like(neighbors, 77)], 1).view(-1)
    return NeighborLists(indptr, neighbors, neighbors[:0], step)


def test_the_reference_has_the_numbers_of_the_kernel():
    assert (kernels.TRIES, kernels.WEIGHT_BITS) == (reference.TRIES, reference.BITS)


@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize(("dtype", "step"), [(torch.int32, 1), (torch.int32, 2), (torch.int64, 1)])
@given(data=st.data(), num_nodes=st.integers(1, 6), length=st.integers(0, 5), bias=st.sampled_from(BIASES),
       key=st.integers(0, 2**64 - 1))  # fmt: skip
@pytest.mark.full
def test_matches_reference(device, is_sorted, dtype, step, data, num_nodes, length, bias, key):
    node = st.integers(0, num_nodes - 1)
    rows = data.draw(st.lists(st.lists(node, max_size=5), min_size=num_nodes, max_size=num_nodes))
    rows = [sorted(row) for row in rows] if is_sorted else rows
    start = data.draw(st.lists(node, max_size=5))
    weights = reference.weights_of(*bias)

    got = walk(make_lists(rows, device, dtype, step), torch.tensor(start, dtype=torch.int64, device=device), length,
               *bias, key=key, is_sorted=is_sorted)  # fmt: skip

    assert got.shape == (len(start), length + 1)
    assert got.dtype == torch.int64
    assert got.tolist() == [reference.walk(rows, first, length, weights, key, w) for w, first in enumerate(start)]


@given(data=st.data(), key=st.integers(0, 2**64 - 1))
def test_walks_along_relations_match_reference(device, data, key):
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
    relations = [
        data.draw(st.lists(st.lists(st.integers(0, ends - 1), max_size=3), min_size=begins, max_size=begins))
        for begins, ends in pairwise(sizes)
    ]
    start = data.draw(st.lists(st.integers(0, sizes[0] - 1), max_size=5))
    begins = torch.tensor(np.cumsum([0, *map(len, relations)])[:-1], device=device)

    got = walk_along(make_lists([row for rows in relations for row in rows], device),
                     torch.tensor(start, dtype=torch.int64, device=device), begins, sizes[0], key=key)  # fmt: skip

    assert got.tolist() == [reference.walk_along(relations, first, key, w) for w, first in enumerate(start)]


def bound_chi_square(degrees: int) -> float:
    """Return the bound that a sum of squares exceeds by chance once in 10**9 (Laurent and Massart, 2000, lemma 1)."""
    tail = math.log(10**9)
    return degrees + 2 * math.sqrt(degrees * tail) + 2 * tail


def measure(found: Counter, chances: dict[int, Fraction]) -> float:
    """Chi-square of counts against chances."""
    total = sum(found.values())
    assert set(found) <= set(chances)
    return sum((found[node] - total * float(chance)) ** 2 / (total * float(chance)) for node, chance in chances.items())


def count_rows(walks):
    """Each row of a matrix of numbers below 8 once, as a list, with the number of its places."""
    width = walks.shape[1]
    counts = torch.bincount((walks * 8 ** torch.arange(width)).sum(1))
    return [
        ([row // 8**place % 8 for place in range(width)], int(counts[row])) for row in counts.nonzero()[:, 0].tolist()
    ]


# A clique with a tail, parallel edges, a loop, and edges that lead one way alone.
ROWS = [[1, 2, 3, 3], [0, 2, 3, 4], [0, 1, 2, 5], [0, 1, 4, 6, 6, 6], [1, 3, 5], [2, 4, 6, 0], [3, 5]]


@pytest.mark.parametrize(("p", "q"), [(1.0, 1.0), (0.25, 4.0), (4.0, 0.25), (0.5, 0.5), (1000.0, 1.0), (1.0, 500.0)])
def test_steps_have_the_chances_of_node2vec(real_device, p, q):
    start = torch.arange(7, device=real_device).repeat(60_000)

    got = walk(make_lists(ROWS, real_device), start, 3, p, q, key=2026).cpu()

    first = {node: Counter() for node in range(7)}
    for (node, following), count in count_rows(got[:, :2]):
        first[node][following] = count
    second = {}
    for (before, node, following), count in count_rows(torch.cat([got[:, :3], got[:, 1:]])):
        second.setdefault((before, node), Counter())[following] = count
    for node, found in first.items():
        even = {other: Fraction(ROWS[node].count(other), len(ROWS[node])) for other in ROWS[node]}
        assert measure(found, even) < bound_chi_square(len(even) - 1), node
    assert len(second) == len({(a, b) for a in range(7) for b in ROWS[a]})
    for (before, node), found in second.items():
        chances = reference.find_chances(ROWS, before, node, Fraction(p), Fraction(q))
        assert measure(found, chances) < bound_chi_square(len(chances) - 1), (before, node)


def test_what_is_hardly_ever_taken_ends_all_the_same(real_device):
    # From 0 the only neighbor is 1; from there a walk goes back, or to a neighbor whose weight is almost zero.
    rows = [[1], [0, 0, 2], [1]]

    got = walk(make_lists(rows, real_device), torch.zeros(20_000, dtype=torch.int64, device=real_device), 2, 1e8, 1e8,
               key=3).cpu()  # fmt: skip

    share = float((got[:, 2] == 2).float().mean())
    assert abs(share - 1 / 3) < 6 * math.sqrt(2 / 9 / 20_000)


@pytest.mark.parametrize("length", [1, 6, 7, 8, 9, 14, 15, 16, 20, 22, 23, 24, 47])
@pytest.mark.parametrize("num_walks", [1, 31, 70])
@pytest.mark.parametrize(("bias", "dtype"), [((1.0, 1.0), torch.int32), ((4.0, 0.25), torch.int32),
                                             ((0.5, 3.0), torch.int64)])  # fmt: skip
def test_many_walks_of_any_length_match_reference(device, length, num_walks, bias, dtype):
    rows = [*ROWS, [], [7, 0]]
    start = torch.arange(num_walks) % len(rows)

    got = walk(make_lists(rows, device, dtype), start.to(device), length, *bias, key=11)

    weights = reference.weights_of(*bias)
    assert got.tolist() == [reference.walk(rows, node, length, weights, 11, w) for w, node in enumerate(start.tolist())]


@pytest.mark.parametrize("length", [3, 17])
def test_long_walks_along_relations_match_reference(device, length):
    relations = [[[1, 0, 3], [2], [], [0, 0, 1, 3]], [[2], [3, 1], [0], [0, 1, 2]]] * length
    relations = relations[:length]
    start = torch.arange(40) % 4

    got = walk_along(make_lists([row for rows in relations[:2] for row in rows], device), start.to(device),
                     torch.tensor([4 * (s % 2) for s in range(length)], device=device), 4, key=8)  # fmt: skip

    assert got.tolist() == [reference.walk_along(relations, node, 8, w) for w, node in enumerate(start.tolist())]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_on_a_gpu_are_checked_ahead(device, dtype):
    ids = torch.arange(1000, dtype=dtype)
    valid, large, low = (
        torch.cat([ids, torch.tensor(own, dtype=dtype)]).to(device) for own in ([], [1000], [-3, 2000])
    )

    BoundsCheck("start", valid, 1000).finish()
    BoundsCheck("start", valid[:0], 0).finish()

    if device.type == "cuda" or SIMULATED:
        BoundsCheck("start", large, 1000)  # Left without a wait, as if an error came between.
        BoundsCheck("start", valid, 1000).finish()
        with pytest.raises(IdError, match=r"start must lie in \[0, 1000\), got 1000"):
            BoundsCheck("start", large, 1000).finish()
        with pytest.raises(IdError, match=r"start must lie in \[0, 1000\), got -3"):
            BoundsCheck("start", low, 1000).finish()


def test_a_check_in_inference_mode_leaves_later_ones_usable(device, monkeypatch):
    # The first check of a thread.
    monkeypatch.setattr(draw_walks, "_OWN", threading.local())
    if device.type == "cpu" and not SIMULATED:
        monkeypatch.setattr(draw_walks, "runs_on_gpu", lambda tensor: True)
        monkeypatch.setattr(draw_walks, "grid_for", lambda *args: None)
        monkeypatch.setattr(draw_walks, "run_gpu", lambda *args: args[-1].fill_(args[2].max() >= args[3]))
    ids = torch.arange(10, device=device)

    with torch.inference_mode():
        BoundsCheck("start", ids, 10).finish()

    BoundsCheck("start", ids, 10).finish()
    for mode in (torch.inference_mode(), torch.no_grad()):
        with mode, pytest.raises(IdError, match=r"start must lie in \[0, 9\), got 9"):
            BoundsCheck("start", ids, 9).finish()


def test_walks_depend_on_key_and_number_alone(device):
    lists = make_lists(ROWS, device)
    start = torch.arange(7, device=device)

    all_of_them, some = walk(lists, start, 9, 2.0, 0.5, key=5), walk(lists, start[:3], 4, 2.0, 0.5, key=5)

    assert torch.equal(all_of_them[:3, :5], some)
    assert not torch.equal(all_of_them, walk(lists, start, 9, 2.0, 0.5, key=6))


@pytest.mark.parametrize(("options", "error", "words"), [
    ({"walk_length": -1}, ArgumentError, r"walk_length must lie in \[0, 2\*\*31\), got -1"),
    ({"walk_length": 2.0}, ArgumentTypeError, "walk_length must be an integer, got 2.0"),
    ({"p": 0.0}, ArgumentError, "p must be finite and above 0, got 0.0"),
    ({"q": float("nan")}, ArgumentError, "q must be finite and above 0, got nan"),
    ({"q": "1"}, ArgumentTypeError, "q must be a number, got '1'"),
    ({"p": 1e-309}, ArgumentError, "p and q must be above"),
    ({"key": -1}, ArgumentError, r"key must lie in \[0, 2\*\*64\), got -1"),
    ({"start": torch.tensor([7])}, IdError, r"start must lie in \[0, 7\), got 7"),
    ({"start": torch.tensor([0.5])}, ArgumentTypeError, "start must have dtype int64 or int32"),
])  # fmt: skip
def test_bad_arguments_are_named(options, error, words):
    arguments = {"start": torch.tensor([0]), "walk_length": 2, "p": 1.0, "q": 1.0, "key": 1, **options}

    with pytest.raises(error, match=words):
        walk(make_lists(ROWS, "cpu"), **arguments)
