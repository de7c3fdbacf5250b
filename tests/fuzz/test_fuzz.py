"""Random cases in which every pair of options meets; and that what is wrong is found, and can be run again."""

import shlex
from itertools import combinations, product
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings, strategies as st

from tests.fuzz import neighbors
from tests.fuzz.__main__ import run_cases, show, show_placements
from tests.fuzz.case import SUBJECTS, Case
from tests.fuzz.space import Space, Tally

# More than 10,000 together.
BATCHES = {"neighbors": 650, "links": 800, "layers": 1200, "features": 4500, "aggregates": 600,
           "convolutions": 250, "snapshots": 600, "frames": 250, "partitions": 150, "stores": 700,
           "producers": 100, "replays": 3200, "node_sets": 700, "small_graphs": 700}  # fmt: skip


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.full
def test_random_batches_are_those_of_the_reference(real_device, subject):
    tallies, failures = run_cases([subject], real_device.type, BATCHES[subject], float("inf"), seed=1)

    assert failures == []
    assert not tallies[subject].missing
    assert tallies[subject].batches >= BATCHES[subject]


def test_the_record_tells_how_many_batches_are_compared():
    record = Path(__file__).parents[2] / "benchmarks" / "results" / "robustness.md"

    assert f"CI compares {sum(BATCHES.values()):,} batches" in record.read_text()


@st.composite
def cases(draw, subject, device):
    """Any case; of one that fails, options shrink to their first values."""
    space = SUBJECTS[subject].space(device)
    row = {}
    for name in space.bound_first:
        possible = [value for value in space.options[name] if space.draw(Random(0), {**row, name: value})]
        row[name] = draw(st.sampled_from(possible))
    return Case(subject, device, draw(st.integers(0, 2**32 - 1)), row)


@pytest.mark.parametrize("subject", SUBJECTS)
# Of other rows than those in which every pair meets; a search finds the smallest case of a failure.
@settings(max_examples=max(5, settings.default.max_examples // 10))
@given(data=st.data())
def test_any_case_is_as_expected(real_device, subject, data):
    case = data.draw(cases(subject, real_device.type))

    case.run()


def test_what_is_wrong_is_found_and_can_be_run_again(monkeypatch):
    def expect_one_edge_less(*args, real=neighbors.expect_sample):
        out = real(*args)
        out.edge = {kind: ids and ids[1:] for kind, ids in out.edge.items()}
        return out

    monkeypatch.setattr(neighbors, "expect_sample", expect_one_edge_less)
    _, (line,) = run_cases(["neighbors"], "cpu", 10**6, float("inf"), seed=1, say=False, most_failures=1)

    *command, text = shlex.split(line)
    assert command == ["python", "-m", "tests.fuzz", "--case"]
    with pytest.raises(AssertionError, match=r"expected|torch\.Size"):
        Case.parse(text).run()
    monkeypatch.undo()
    assert Case.parse(text).run() > 0


@pytest.mark.parametrize("line", [
    # Two of the batches before a weight is frozen have as many edges as nodes.
    "replays cpu 983029654 event=given second=freeze norm=rows trim=yes jk=none dtype=float32 seeds=5 replace=no "
    "threads=all layers=2 loss=all often=once optimizer=momentum model=Graph",
])  # fmt: skip
def test_cases_that_failed_without_an_error_of_the_package(line):
    assert Case.parse(line).run() > 0


def test_a_limit_of_time_ends_what_has_not_met_too():
    tallies, failures = run_cases(["features"], "cpu", 0, 0, seed=1, at_most=0.0)

    assert failures == []
    assert tallies["features"].cases == 0
    assert tallies["features"].missing
    assert "| features | pinned |" in show_placements(tallies)


class TestSpace:
    """Pairs of options under rules."""

    SPACE = Space(
        {"a": ("1", "2", "3"), "b": ("1", "2", "3"), "c": ("x", "y"), "d": ("u", "v", "w")},
        ((("a", "b"), lambda a, b: a != b), (("b", "c"), lambda b, c: b != "3" or c == "y"),
         (("a", "d"), lambda a, d: d != "w" or a == "1")),
    )  # fmt: skip

    def test_pairs_are_those_of_all_rows(self):
        names = list(self.SPACE.options)
        rows = [dict(zip(names, values, strict=True)) for values in product(*self.SPACE.options.values())]
        expected = {pair for row in rows if self.SPACE.allows(row) for pair in combinations(row.items(), 2)}

        assert self.SPACE.pairs == expected

    def test_few_rows_cover_all_pairs(self):
        rows = list(self.SPACE.cover(Random(0), self.SPACE.pairs))

        assert all(self.SPACE.allows(row) for row in rows)
        assert {pair for row in rows for pair in self.SPACE.pairs_of(row)} == self.SPACE.pairs
        assert len(rows) < 14

    def test_a_tally_tells_what_has_not_met(self):
        tally = Tally(self.SPACE)
        tally.add({"a": "1", "b": "2", "c": "x", "d": "u"}, 3, 0.5)

        assert len(self.SPACE.pairs - tally.missing) == 6
        assert tally.summarise() == {"cases": 1, "batches": 3, "options": 4, "pairs": len(self.SPACE.pairs),
                                     "pairs met": 6, "least often": 0, "seconds": 0.5}  # fmt: skip
        assert "| all | 1 | 3 |" in show({"one": tally})

    def test_a_tally_counts_pairs_by_value(self):
        tally = Tally(self.SPACE)
        for _ in range(2):
            tally.add({"a": "1", "b": "2", "c": "x", "d": "u"}, 3, 0.5)

        # With `a` 1: two values of b, two of c, three of d; with 2 and 3: two, two, and two of d.
        assert tally.count_by("a") == {"1": (3, 7, 0), "2": (0, 6, 0), "3": (0, 6, 0)}
        assert tally.count_by("e") == {}

    def test_what_contradicts_has_no_row(self):
        assert self.SPACE.draw(Random(0), {"a": "2", "d": "w"}) is None
