"""Batches whose rows are known ahead are those of one machine, and rows that several of them read travel once."""

import itertools
import warnings

import pytest
import torch

from pyg_direct import LinkNeighborLoader, NeighborLoader
from pyg_direct.distributed.dist_loader import DistLinkNeighborLoader, DistNeighborLoader
from pyg_direct.errors import ArgumentError, LoaderWarning
from tests.distributed.dist_loader.test_loader import (
    LINK_CASES,
    NODE_CASES,
    assert_typed,
    make_loader,
    make_typed_loaders,
    write_types,
)
from tests.distributed.dist_loader.test_overlap import Exchanging
from tests.distributed.ranks import as_dict, assert_equal, assert_in_turn, make_data, open_graph, write_data
from tests.processes import run_ranks

TIMED = [name for name in (*NODE_CASES, *LINK_CASES) if "time" in name or "weight" in name]
PLAIN = [name for name in (*NODE_CASES, *LINK_CASES) if name not in TIMED and name != "transformed"]
SEEDS = torch.arange(150)
OPTIONS = {"batch_size": 10, "seed": 1, "uneven": "keep"}


def foresee(kind, ahead=5):
    return lambda *args, **options: kind(*args, **options, ahead=ahead)


def run_cases(rank, folder):
    """Batches of two epochs of each case, and its report."""
    found = {}
    for place, names in (("p", PLAIN), ("timed", TIMED)):
        with open_graph(folder / place) as graph:
            for name in names:
                loader = make_loader(name, graph, foresee(DistNeighborLoader), foresee(DistLinkNeighborLoader))
                loader.record()
                found[name] = [[as_dict(batch) for batch in loader] for _ in range(2)], str(loader.tell())
    with open_graph(folder / "types") as graph:
        loaders = make_typed_loaders(graph, foresee(DistNeighborLoader), foresee(DistLinkNeighborLoader))
        return found, [[as_dict(batch) for batch in loader] for loader in loaders]


@pytest.mark.full
def test_batches_of_all_options_are_those_of_one_machine(tmp_path):
    data, typed = make_data(), write_types(tmp_path / "types", 2)
    write_data(tmp_path / "p", data, 2)
    write_data(tmp_path / "timed", data, 2, times=True, weights=True)

    ranks = run_ranks(run_cases, 2, tmp_path)

    for name in (*PLAIN, *TIMED):
        alone = make_loader(name, data, NeighborLoader, LinkNeighborLoader)
        for epoch in range(2):
            assert_in_turn([found[name][0][epoch] for found, _ in ranks], alone)
        for report in (found[name][1] for found, _ in ranks):
            assert "rows of other parts for planned batches: " in report
    assert_typed(typed, [batches for _, batches in ranks])


class BrokenSampler(list):
    """Positions of seeds, of which the last is not there."""

    def __iter__(self):
        yield from super().__iter__()
        raise ZeroDivisionError


def run_others(rank, folder):
    """What ranks have with seeds of their own, loops that are left, and functions of the program."""
    found = {}
    with open_graph(folder) as graph:
        # 0, 5 and 12 batches.
        own = DistNeighborLoader(graph, [3, 2], torch.arange((0, 50, 120)[rank]), ranks="own", ahead=4, **OPTIONS)
        found["own"] = [[as_dict(batch) for batch in own] for _ in range(2)]
        left = DistNeighborLoader(graph, [3, 2], SEEDS, ahead=7, **OPTIONS)
        found["left"] = [as_dict(batch) for batch in itertools.islice(left, (2, None, 1)[rank])]
        found["after"] = [as_dict(batch) for batch in left]
        alone = DistNeighborLoader(graph, [3, 2], SEEDS, ahead=3, prefetch=0, **OPTIONS)
        found["no prefetch"] = [as_dict(batch) for batch in alone]
        given = DistNeighborLoader(graph, [3, 2], SEEDS, ahead=3, transform_sampler_output=lambda out: out, **OPTIONS)
        with pytest.warns(LoaderWarning, match="ahead=3: not used, as a function of the program takes part"):
            found["given"] = list(map(as_dict, given))
        with pytest.raises(ArgumentError, match="must be equal in all processes"):
            DistNeighborLoader(graph, [3, 2], SEEDS, ahead=rank, **OPTIONS)
        sent = graph.communicator.sent
        for name, ahead in (("plain", 0), ("planned", 16)):
            before, remote = sent["rows"], graph.rows.num_remote
            for _ in DistNeighborLoader(graph, [3, 2], SEEDS, ahead=ahead, **OPTIONS):
                pass
            found[name] = sent["rows"] - before, graph.rows.num_remote - remote
        broken = DistNeighborLoader(graph, [3], SEEDS, ahead=4, ranks="own", batch_size=2, uneven="keep", prefetch=0,
                                    sampler=BrokenSampler(range(5)))  # fmt: skip
        batches = iter(broken)
        found["broken"] = [next(batches).input_id.tolist() for _ in range(2)]
        with pytest.raises(ZeroDivisionError):
            next(batches)
    return found


def test_ranks_with_other_batches_and_loops_that_are_left(tmp_path):
    data = make_data()
    write_data(tmp_path / "p", data, 3)

    ranks = run_ranks(run_others, 3, tmp_path / "p")

    assert [[len(epoch) for epoch in found["own"]] for found in ranks] == [[0, 0], [5, 5], [12, 12]]
    alone = list(NeighborLoader(data, [3, 2], SEEDS, batch_size=10, seed=1, device="cpu"))
    for name in ("no prefetch", "given"):
        assert_in_turn([found[name] for found in ranks], alone)
    for number, batch in enumerate(alone):
        rank, place = number % 3, number // 3
        if rank == 1 or (rank == 0 and place < 2):
            assert_equal(ranks[rank]["left"][place], as_dict(batch))
    assert [len(found["left"]) for found in ranks] == [2, 5, 1]
    assert all(len(found["after"]) == 5 for found in ranks)
    # A batch reads half of the graph here: 5 batches of a rank take little more than one.
    for (num_bytes, num_rows), (planned_bytes, planned_rows) in ((found["plain"], found["planned"]) for found in ranks):
        assert 0 < planned_rows < num_rows
        assert 0 < planned_bytes < num_bytes
    assert all(found["broken"] == [[0, 1], [2, 3]] for found in ranks)


@pytest.mark.sim
@pytest.mark.parametrize("options", [{}, {"disjoint": True}, {"weight_attr": "weight"}], ids=str)
def test_batches_of_a_captured_exchange(tmp_path, group, options):
    data = make_data(40, 90)
    write_data(tmp_path / "p", data, 1, weights=True)

    with Exchanging(tmp_path / "p", device="cpu") as graph:
        loader = DistNeighborLoader(graph, [2, 2], torch.arange(12), batch_size=4, seed=3, shuffle=True, ahead=2,
                                    **options)  # fmt: skip
        found = list(loader)
        assert loader._sampler.open_plan()._find_captured().node_rows is None

    alone = NeighborLoader(data, [2, 2], torch.arange(12), batch_size=4, seed=3, shuffle=True, device="cpu",
                           prefetch=0, **options)  # fmt: skip
    for batch, other in zip(found, alone, strict=True):
        assert_equal(as_dict(batch), as_dict(other))


def test_a_graph_in_one_memory_needs_no_foresight(tmp_path, group):
    write_data(tmp_path / "p", make_data(), 1)

    with open_graph(tmp_path / "p", share_graph="auto") as graph:
        with pytest.warns(LoaderWarning, match="ahead=2: not used, as the graph is in one memory"):
            loader = DistNeighborLoader(graph, [2], SEEDS, ahead=2, **OPTIONS)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert len(list(loader)) == 15
        for wrong in (-1, 129, "2G", True, None):
            with pytest.raises(ArgumentError, match=r"ahead must be a number of batches in \[0, 128\]"):
                DistNeighborLoader(graph, [2], SEEDS, ahead=wrong, **OPTIONS)
