"""What programs hear whose servers cannot open their part: which file, and what is wrong with it; nobody waits."""

import importlib.util
import shutil

import pytest

from pyg_direct import NeighborLoader
from pyg_direct.distributed.dist_loader import DistNeighborLoader
from pyg_direct.distributed.server.client_graph import ClientGraph
from pyg_direct.errors import ArgumentError, PartitionError, RankError
from tests.distributed.damage import SAID, damage
from tests.distributed.ranks import COMMON, as_dict, assert_equal

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(900),
]
# Seconds that an answer is waited for: more than a test has, so that who waits them out hears nothing.
TIMEOUT = 3600


@pytest.fixture(scope="module")
def engine():
    """Ray for the tests of this file."""
    import ray

    from pyg_direct.distributed.server import ray_servers as engine

    with pytest.MonkeyPatch.context() as patch:
        # Names are waited for until they are free.
        patch.setattr(engine, "_FREE", float(TIMEOUT))
        engine._start(None)
        yield engine
        ray.shutdown()


@pytest.mark.parametrize("kind", SAID)
def test_who_serves_damaged_files_hears_which(engine, folder, kind):
    damage(folder, kind, 1)

    with pytest.raises((RankError, PartitionError)) as caught:
        engine.serve(folder, kind, num_cpus=0.5, check="full", timeout=TIMEOUT)

    # The manifest is read by the program itself.
    by_server = "the server of part 1 failed: PartitionError: "
    assert str(caught.value).startswith(f"{'' if kind == 'version' else by_server}{folder}")
    assert SAID[kind] in str(caught.value)
    assert "\n" not in str(caught.value)
    # None of its servers is left, whose name is free again.
    with pytest.raises(ArgumentError, match="name must be that of servers"):
        engine.stop(kind)


def test_names_are_free_once_servers_are_ended(engine, folder):
    engine.serve(folder, "again", num_cpus=0.5).close()
    engine.serve(folder, "again", num_cpus=0.5)
    assert engine.stop("again") == 2

    with pytest.raises(ArgumentError, match="name must be that of servers"):
        engine.stop("again")


@pytest.mark.parametrize("kind", ["missing", "version"])
def test_a_client_whose_server_finds_damaged_files_when_it_comes_back_hears_which(engine, folder, data, kind):
    import ray

    name = f"back-{kind}"
    servers = engine.serve(folder, name, num_cpus=0.5, timeout=TIMEOUT)
    graph = ClientGraph(engine.connect(2, name, timeout=TIMEOUT), device="cpu")
    batches = iter(DistNeighborLoader(graph, [4, 3], prefetch=1, **COMMON))
    got = [as_dict(next(batches)) for _ in range(2)]
    shutil.copytree(folder, folder.parent / "kept")
    damage(folder, kind, 1)
    ray.kill(ray.get_actor(f"{name}/1", namespace="pyg_direct"), no_restart=False)
    with pytest.raises(RankError, match="the server of part 1 failed: PartitionError: ") as caught:
        got.extend(as_dict(batch) for batch in batches)
    # Told once more, at once.
    with pytest.raises(RankError, match="the server of part 1 failed: "):
        next(iter(DistNeighborLoader(graph, [4, 3], **COMMON)))
    shutil.rmtree(folder)
    shutil.move(folder.parent / "kept", folder)
    # Once the files are whole again, so are the batches.
    again = [as_dict(batch) for batch in DistNeighborLoader(graph, [4, 3], **COMMON)]
    servers.close()

    assert str(folder) in str(caught.value)
    assert SAID[kind] in str(caught.value)
    expected = [as_dict(batch) for batch in NeighborLoader(data, [4, 3], device="cpu", **COMMON)]
    assert len(got) < len(expected)
    for batch, other in [*zip(got, expected, strict=False), *zip(again, expected, strict=True)]:
        assert_equal(batch, other)
