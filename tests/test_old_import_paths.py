"""Import paths of 0.1.0: public names are found under them, by programs and in pickles."""

import importlib
import pickle
import sys

import pytest
import torch

import pyg_direct
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.old_import_paths import MOVED

# Its home asks for Ray as it is imported, which not every machine has.
WITH_RAY = "distributed.engine"


@pytest.mark.parametrize("old", sorted({*MOVED} - {WITH_RAY}))
def test_an_old_path_has_the_names_of_its_home_and_warns(old):
    home = importlib.import_module(f"pyg_direct.{MOVED[old]}")
    names = [name for name, value in vars(home).items() if getattr(value, "__module__", None) == home.__name__]
    sys.modules.pop(f"pyg_direct.{old}", None)

    with pytest.warns(DeprecationWarning, match=f"pyg_direct.{old} is {home.__name__} since 0.2.0"):
        module = importlib.import_module(f"pyg_direct.{old}")

    assert names
    assert all(getattr(module, name) is getattr(home, name) for name in names)
    with pytest.raises(AttributeError, match=f"module '{home.__name__}' has no attribute 'nothing'"):
        _ = module.nothing


def test_an_old_path_whose_home_needs_an_extra_says_so_as_its_home_does(monkeypatch):
    for name in ("ray", f"pyg_direct.{WITH_RAY}", f"pyg_direct.{MOVED[WITH_RAY]}"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    # As if it were not installed.
    monkeypatch.setitem(sys.modules, "ray", None)

    with pytest.raises(ModuleNotFoundError) as told:
        importlib.import_module(f"pyg_direct.{MOVED[WITH_RAY]}")
    with pytest.raises(ModuleNotFoundError) as told_of_old:
        importlib.import_module(f"pyg_direct.{WITH_RAY}")

    assert "ray" in str(told.value)
    assert str(told_of_old.value) == str(told.value)


def test_public_names_have_moved_to_homes_that_the_package_knows():
    homes = {pyg_direct._ROOMS[name] for name in pyg_direct.__all__ if name != "__version__"}

    assert homes & set(MOVED.values())
    assert not homes & set(MOVED)


@pytest.mark.filterwarnings("ignore:pyg_direct.graph.topology:DeprecationWarning")
def test_objects_that_were_pickled_under_an_old_path_are_read():
    topology = CSRTopo(torch.tensor([[0, 1, 2], [1, 2, 0]]))
    text = pickle.dumps(topology, protocol=0).replace(b"pyg_direct.graph.csr_topo", b"pyg_direct.graph.topology")
    assert b"pyg_direct.graph.topology" in text

    got = pickle.loads(text)

    assert type(got) is CSRTopo
    assert torch.equal(got.indptr, topology.indptr)


def test_other_modules_that_are_not_there_are_not_found():
    with pytest.raises(ModuleNotFoundError, match=r"pyg_direct\.loader\.nothing"):
        importlib.import_module("pyg_direct.loader.nothing")
