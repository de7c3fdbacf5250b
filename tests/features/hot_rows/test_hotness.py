"""Rows are ranked by the graph, by counted reads and by scores."""

import pytest
import torch

from pyg_direct import Feature, count_reads
from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.features.hot_rows import blend_reads, choose_hottest, score_rows


def test_reads_are_counted(device):
    batches = [torch.tensor(ids, device=device) for ids in ([3, 1, 3], [3], [], [0])]

    counts = count_reads((ids.long() for ids in batches), 5)

    assert (counts.tolist(), counts.device.type) == ([1, 1, 0, 3, 0], device.type)


def test_nothing_read_counts_nothing():
    assert count_reads([], 3).tolist() == [0, 0, 0]


@pytest.mark.parametrize("bad", [5, -1])
def test_ids_of_no_row_are_told(device, bad):
    with pytest.raises(ArgumentError, match=r"batches must hold ids in \[0, 5\), got 2 outside"):
        count_reads([torch.tensor([0, bad, bad], device=device)], 5)


def test_scores_choose_the_hottest_rows(device):
    scores = torch.tensor([0.5, 3.0, 0.5, 4.0], device=device)

    ids, misses = choose_hottest(scores, 4, 2)

    assert (ids.tolist(), misses) == ([1, 3], pytest.approx(1 / 8))


def test_among_equals_the_first_rows_are_hotter():
    assert choose_hottest(torch.ones(6), 6, 2).ids.tolist() == [0, 1]


def test_scores_of_nothing_miss_everything():
    assert choose_hottest(torch.zeros(6), 6, 2).misses == 1.0


@pytest.mark.parametrize(("hotness", "error", "words"), [
    ("speed", ArgumentError, "hotness must be one of degree, frequency, expected or a tensor"),
    (3, ArgumentTypeError, "hotness must be a name or a tensor of scores, got int"),
    (torch.zeros(2, 2), ArgumentError, r"one number for each row, got \(2, 2\)"),
])  # fmt: skip
def test_what_ranks_nothing_is_refused(hotness, error, words):
    with pytest.raises(error, match=words):
        Feature(device="cpu", hotness=hotness)


def test_frequency_is_deprecated():
    with pytest.warns(DeprecationWarning, match="use hotness='expected'"):
        Feature(device="cpu", hotness="frequency")


@pytest.mark.filterwarnings("ignore:hotness='frequency':DeprecationWarning")
@pytest.mark.parametrize(("hotness", "words"), [
    (torch.zeros(3), "a score for each of the 4 rows, got 3"),
    (torch.tensor([1.0, float("nan"), 0.0, 0.0]), "got a NaN"),
    ("frequency", "needs to know what is sampled"),
])  # fmt: skip
def test_scores_of_other_rows_are_refused(hotness, words):
    with pytest.raises(ArgumentError, match=words):
        score_rows(hotness, None, 4)


def test_a_short_run_leaves_rows_to_their_chances(device):
    draws = torch.Generator().manual_seed(0)
    chances = torch.rand(20_000, generator=draws) * 0.05
    counts = torch.poisson(20 * chances, generator=draws).int()

    scores = blend_reads(counts.to(device), chances.to(device)).cpu()

    assert choose_hottest(scores, 20_000, 2000).ids.tolist() == choose_hottest(chances, 20_000, 2000).ids.tolist()


@pytest.mark.parametrize("batches", [10, 40, 4000])
def test_counts_are_trusted_as_far_as_chances_are_off(batches):
    draws = torch.Generator().manual_seed(0)
    computed = torch.rand(50_000, generator=draws) * 0.05
    true = computed * torch.rand(50_000, generator=draws) * 2
    counts = torch.poisson(batches * true, generator=draws).int()

    scores = blend_reads(counts, computed)

    def reads(ranking):
        return float(true[choose_hottest(ranking, 50_000, 5000).ids].sum())

    assert reads(scores) > 1.001 * max(reads(computed), reads(counts) if batches < 4000 else 0)
    assert reads(scores) >= 0.999 * reads(counts)


def test_a_run_that_read_nothing_tells_nothing():
    assert blend_reads(torch.zeros(3, dtype=torch.int32), torch.zeros(3)).tolist() == [0, 0, 0]
    assert blend_reads(torch.zeros(0, dtype=torch.int32), torch.zeros(0)).tolist() == []
