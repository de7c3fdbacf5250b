"""Objects are one line for `repr`, rows of a table for notebooks, and numbers under flat names for loggers."""

import math

import pytest
from torch_geometric.sampler import NumNeighbors

from pyg_direct.object_text import (
    describe,
    flatten,
    one_line,
    show_count,
    show_fanouts,
    show_options,
    show_parts,
    show_place,
    show_sizes,
    show_table,
)


class Thing:
    def __init__(self, parts, fails=False):
        self.parts, self.fails = parts, fails

    @one_line
    def __repr__(self):
        yield from self.parts
        if self.fails:
            raise RuntimeError("what is not there")


def test_parts_are_joined_behind_the_class():
    assert repr(Thing(["3 seeds", "cpu"])) == "Thing(3 seeds, cpu)"
    assert repr(Thing([])) == "Thing()"


def test_places_stand_behind_a_semicolon():
    assert describe(Thing([]), ["3 seeds"], ["x 1 B", "y 2 B"]) == "Thing(3 seeds; x 1 B, y 2 B)"
    assert describe(Thing([]), [], ["x 1 B"]) == "Thing(x 1 B)"


def test_what_is_not_complete_has_the_parts_that_can_be_listed():
    assert repr(Thing(["3 seeds"], fails=True)) == "Thing(3 seeds, ...)"
    assert repr(Thing.__new__(Thing)) == "Thing(...)"
    assert describe(Thing([]), iter(lambda: 1 / 0, None), ["x"]) == "Thing(...)"


def test_it_is_one_line_whatever_a_part_holds():
    assert repr(Thing(["a\n   b", "c"])) == "Thing(a b, c)"


@pytest.mark.parametrize(("count", "words"), [(0, "0 batches"), (1, "1 batch"), (2500, "2,500 batches")])
def test_numbers_have_their_noun(count, words):
    assert show_count(count, "batch", "batches") == words


def test_options_that_are_not_set_are_left_out():
    assert show_options(seed=0, name=None, replace=False, kinds=[], ranks=(0, 2)) == ["seed=0", "ranks=(0, 2)"]


@pytest.mark.parametrize(("fanouts", "words"), [
    ([10, 5], "[10, 5]"), (NumNeighbors([3]), "[3]"), ({"a": [2], "b": [2]}, "[2] of 2 types"),
    (NumNeighbors({("a", "to", "b"): [2], ("b", "to", "a"): [3]}), "fanouts of 2 relations"),
    (NumNeighbors({}, default=[4]), "[4]"),
])  # fmt: skip
def test_fanouts_tell_what_they_are_of(fanouts, words):
    assert show_fanouts(fanouts) == words


def test_sizes_and_places():
    assert (show_sizes(5), show_sizes({"a": 5, "b": 7})) == ("5 nodes", "12 nodes of 2 types")
    assert (show_place("unified", "cuda:0"), show_place("cuda", "cuda:0")) == ("unified, cuda:0", "cuda:0")


def test_numbers_get_flat_names():
    numbers = {
        "a b": {"GPU memory (hot)": 3, "none": None, "is": True},
        "seconds": {"p50": math.pi},
        "text": "x",
        "n": 1,
    }

    assert flatten(numbers) == {"a_b/GPU_memory_hot": 3, "seconds/p50": math.pi, "n": 1}


def test_tables_are_html_that_a_name_cannot_break():
    table = show_table("rows of <x>", [["<b>", 1]], ["name", "count"])

    assert "<caption>rows of &lt;x&gt;</caption>" in table
    assert "&lt;b&gt;</td>" in table
    assert table.count("<tr>") == 2
    assert show_parts(Thing([]), ["3 seeds"], ["x 1 B"]).count("<tr>") == 2
