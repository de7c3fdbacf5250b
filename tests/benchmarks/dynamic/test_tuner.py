"""The best groups are found among all that nest, and choices are told beside them."""

import itertools

import pytest
from hypothesis import given, settings, strategies as st

from benchmarks.dynamic import tuner
from pyg_direct.datasets.dynamic_graphs import synthetic_dtdg


def groups_of(count):
    return [(first, min(first + size, count), form) for size in (1, 2, 4, 8) for first in range(0, count, size)
            for form in (("split", "mask") if min(first + size, count) - first > 1 else ("mask",))]  # fmt: skip


@settings(max_examples=20)
@given(st.integers(1, 8), st.randoms(use_true_random=False))
def test_the_best_is_the_least_of_all_covers(count, random):
    seconds = {group: random.randint(1, 30) for group in groups_of(count)}

    best = tuner.find_best(seconds, 0, count)

    assert [group[0] for group in best] == [0, *(group[1] for group in best[:-1])]
    assert best[-1][1] == count
    covers = (cover for size in range(1, min(count, 4) + 1) for cover in itertools.combinations(seconds, size))
    exact = (cover for cover in covers if sorted(t for g in cover for t in range(g[0], g[1])) == list(range(count)))
    assert sum(seconds[group] for group in best) <= min(
        (sum(seconds[g] for g in cover) for cover in exact), default=1e9
    )


@pytest.mark.parametrize("slow", ["mask", "split"])
def test_choices_are_told_beside_the_best(monkeypatch, slow):
    # A device of which one form takes ten times as long.
    clock = [0.0]
    monkeypatch.setattr(tuner.time, "perf_counter", lambda: clock[0])

    def run(x, group, matrices):
        clock[0] += 10 if group[2] == slow and group[1] - group[0] > 1 else 1

    monkeypatch.setattr(tuner, "_run", run)
    sets = {"all shared": synthetic_dtdg(50, 200, 8, 0.0)}

    row, summary = tuner.measure_tuner(sets, [4], rounds=2, device="cpu")

    # A CPU's groups are split.
    seconds = 10 if slow == "split" else 1
    assert row.note == f"chosen 8s, took {seconds}000000 us; best 8{'s' if slow == 'mask' else 'm'}, took 1000000 us"
    assert (row.p50, summary.p50) == (seconds, float(slow == "mask"))


def test_plans_take_turns_in_being_first(monkeypatch):
    # Whatever is run second finds its data in the caches and takes half the time.
    clock, order = [0.0], []
    monkeypatch.setattr(tuner.time, "perf_counter", lambda: clock[0])

    def run(x, group, matrices):
        order.append(group[0])
        clock[0] += group[0] * (2 if len(order) % 2 else 1)

    monkeypatch.setattr(tuner, "_run", run)

    ratio = tuner.compare_plans([], {(3, 4, "mask"): None, (2, 3, "mask"): None}, [(3, 4, "mask")], [(2, 3, "mask")], 9)

    assert order[:4] == [3, 2, 2, 3]
    assert ratio == 3 / 2
