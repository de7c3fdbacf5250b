"""PyG's loaders replaced while a test runs."""

import logging

import pytest

import pyg_direct
from pyg_direct import progress


@pytest.fixture
def _installed():
    """PyG's names are ours, on the CPU."""
    pyg_direct.install(device="cpu")
    yield
    pyg_direct.uninstall()


@pytest.fixture
def said(caplog, monkeypatch):
    """What the logger said, each line once for a test."""
    monkeypatch.setattr(progress, "_SAID", set())
    caplog.set_level(logging.INFO, "pyg_direct")
    return caplog
