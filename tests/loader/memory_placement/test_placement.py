"""Where `auto` puts things, and what it says."""

import logging

import pytest
import torch

from pyg_direct import progress
from pyg_direct.loader.memory_placement import Choice, Placed, Rows, choose_places, describe
from pyg_direct.progress import announce
from pyg_direct.runtime.cuda.device import budget_of

GIB = 1 << 30
X = Rows("x", 10 * GIB, 1 << 24, True)
EDGES = Rows("edge_attr", 6 * GIB, 1 << 24, False)
LABELS = Rows("y", GIB // 8, 1 << 24, True)


@pytest.mark.parametrize(("free", "left"), [(0, 0), (10, 5), (16, 8), (24, 8), (40, 10), (140, 35)])
def test_a_quarter_stays_free_but_at_least_8_gib_or_half(free, left):
    assert budget_of(free * GIB) == (free - left) * GIB


@pytest.mark.parametrize(("free", "left"), [(100, 100), (192, 128), (256, 128), (300, 150)])
def test_room_for_workspaces_stays_free(free, left):
    assert budget_of(free << 20) == (free - left) << 20


def choose(attributes, gib, is_auto=True, fill_cache=True):
    return choose_places(attributes, int(gib * GIB), is_auto=is_auto, fill_cache=fill_cache)


def test_all_goes_to_the_gpu_when_all_fits():
    places = choose([X, EDGES, LABELS], 17)

    assert set(places.values()) == {Choice("cuda")}


def test_small_tables_come_first():
    places = choose([X, EDGES, LABELS], 11)

    assert (places["y"], places["edge_attr"]) == (Choice("cuda"), Choice("cuda"))


def test_what_is_left_becomes_a_cache_of_the_others():
    places = choose([X, EDGES, LABELS], 11)

    assert places["x"] == Choice("host", 11 * GIB - EDGES.num_bytes - LABELS.num_bytes)


def test_caches_share_what_is_left_by_size():
    twin = Rows("z", 30 * GIB, 1 << 24, True)

    places = choose([X, twin], 4)

    assert places == {"x": Choice("host", GIB), "z": Choice("host", 3 * GIB)}


def test_edges_have_no_cache():
    places = choose([EDGES], 4)

    assert places == {"edge_attr": Choice("host", 0)}


def test_a_cache_that_the_user_sizes_is_not_filled():
    assert choose([X], 4, fill_cache=False) == {"x": Choice("host", 0)}


@pytest.mark.parametrize("gib", [17, 0.1])
def test_on_the_host_only_short_rows_that_are_a_small_part_go_to_the_gpu(gib):
    places = choose([X, LABELS], gib, is_auto=False, fill_cache=False)

    assert places == {"x": Choice("host", 0), "y": Choice("cuda" if gib == 17 else "host", 0)}


def test_no_memory_is_no_budget():
    assert choose([X, LABELS], 0) == {"x": Choice("host", 0), "y": Choice("host", 0)}


def test_the_line_says_what_is_where():
    parts = [Placed("topology", 1_020_000_000, "cuda:0"), Placed("x", 9_500_000_000, "unified", 0.123),
             Placed("y+mask", 2048, "cuda:0")]  # fmt: skip

    line = describe(parts)

    assert line == "topology 1.0 GB on cuda:0, x 9.5 GB unified (12 % hot in GPU memory), y+mask 2.0 KB on cuda:0"


@pytest.fixture
def fresh_logger(monkeypatch):
    monkeypatch.setattr(progress, "_SAID", set())
    loggers = [logging.getLogger("pyg_direct"), logging.getLogger("pyg_direct.notice")]
    before = [(logger.level, logger.handlers[:]) for logger in loggers]
    loggers[1].handlers.clear()
    yield loggers[0]
    for logger, (level, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers[:] = handlers


def test_a_line_is_said_once(fresh_logger, caplog):
    for line in ("here", "there", "here"):
        announce(line)

    assert caplog.messages == ["here", "there"]


def test_a_level_above_info_makes_it_quiet(fresh_logger, caplog):
    fresh_logger.setLevel(logging.WARNING)

    announce("here")

    assert caplog.messages == []


def test_without_any_logging_it_is_seen_on_stderr(fresh_logger, capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])

    announce("here")

    assert capsys.readouterr().err == "pyg_direct: here\n"


def test_a_program_that_sets_logging_up_later_sees_each_line_once(fresh_logger, capsys, caplog, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(logging.getLogger(), "handlers", [])
        announce("here")
        announce("there")

    announce("elsewhere")

    assert capsys.readouterr().err == "pyg_direct: here\npyg_direct: there\n"
    assert caplog.messages[-1] == "elsewhere"


def test_a_level_that_is_set_later_counts(fresh_logger, caplog):
    announce("here")
    fresh_logger.setLevel(logging.WARNING)

    announce("there")

    assert caplog.messages == ["here"]


def test_all_else_is_quiet(fresh_logger, capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    announce("here")

    logging.getLogger("pyg_direct.features").info("something")
    logging.getLogger("pyg_direct.features").warning("something else")

    assert capsys.readouterr().err == "pyg_direct: here\n"


@pytest.mark.gpu
class TestOnGpu:
    """The choice of a loader."""

    @pytest.fixture
    def data(self):
        from tests.batches import make_data
        from tests.graphs import make_random_graph

        return make_data(make_random_graph(3000, 60_000), x=torch.randn(3000, 64))

    def test_a_loader_says_where_things_are(self, data, fresh_logger, caplog):
        from pyg_direct import NeighborLoader

        next(iter(NeighborLoader(data, [3], batch_size=16)))

        assert len(caplog.messages) == 1
        assert caplog.messages[0].startswith("topology ")
        assert "x 768.0 KB on cuda:0" in caplog.messages[0]

    def test_little_memory_gives_a_cache_of_what_is_left(self, data, monkeypatch):
        from pyg_direct import NeighborLoader
        from pyg_direct.loader.collate import attributes as placed_rows

        # 128 MiB stay free.
        monkeypatch.setattr(placed_rows, "free_bytes", lambda index: (128 << 20) + edges + labels + 64 * 4 * 1000)
        edges, labels = 60_000 * 12, 3000 * 8

        loader = NeighborLoader(data, [3, 2], batch_size=16, seed=1)
        batches = list(loader)

        x = loader._general.describe()["x"]
        assert (x.placement, x.num_hot_rows) == ("unified", 1000)
        for batch in batches:
            assert torch.equal(batch.x.cpu(), data.x[batch.n_id.cpu()])

    def test_topology_and_attributes_may_live_apart(self, data):
        from pyg_direct import NeighborLoader

        loader = NeighborLoader(data, [3], batch_size=16, placement="unified", topology_placement="cuda")
        next(iter(loader))

        assert loader._plan.topology.placement == "cuda"
        assert loader._general.describe()["x"].placement == "unified"
