"""Versions of Ray whose own modules lack a name are refused by it, unless the name is not needed."""

import importlib
import importlib.util
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray"),
    pytest.mark.filterwarnings("ignore"),
]
ROOT = Path(__file__).parents[4]
INTERNALS = {
    ("ray_constants", "ENABLE_RAY_CLUSTER"): lambda engine: engine._start(None),
    ("services", "canonicalize_bootstrap_address"): lambda engine: engine.connect(2, address="auto"),
    ("worker", "_global_node"): lambda engine: engine._ends_with_this(),
}


@pytest.fixture
def engine(monkeypatch):
    from pyg_direct.distributed.server import ray_servers as engine

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv(engine._FOR_HOSTS, raising=False)
    return engine


@pytest.mark.parametrize(("module", "name"), INTERNALS)
def test_ray_that_lacks_a_name_is_refused_before_it_is_started(engine, monkeypatch, module, name):
    import ray

    monkeypatch.delattr(importlib.import_module(f"ray._private.{module}"), name)

    with pytest.raises(
        ImportError, match=rf"ray\._private\.{module}\.{name}, which ray .* lacks: pip install"
    ) as caught:
        INTERNALS[module, name](engine)
    monkeypatch.undo()

    assert f'"{engine._KNOWN_RAY}"' in str(caught.value)
    assert not ray.is_initialized()


def test_clusters_of_an_address_need_no_internal_names(engine, monkeypatch):
    import ray

    joined = []
    monkeypatch.setattr(ray, "init", lambda **options: joined.append(options["address"]))
    monkeypatch.setattr(engine, "RayServers", lambda *_: None)
    monkeypatch.setattr(engine, "_find_internal", lambda *_: pytest.fail("an internal name was asked for"))

    engine.connect(2, address="10.0.0.1:6379")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.2:6379")
    engine.connect(2, address="auto")
    engine.connect(2)

    # None, and `auto`, leave it to Ray to read RAY_ADDRESS.
    assert joined == ["10.0.0.1:6379", "auto", None]


def test_the_version_that_is_tested_is_among_those_that_are_named(engine):
    (tested,) = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("ray==")]

    assert tested.removeprefix("ray==") in Requirement(engine._KNOWN_RAY).specifier
