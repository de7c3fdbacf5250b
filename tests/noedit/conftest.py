"""PyG's loaders replaced while a test runs."""

import pytest

import pyg_direct


@pytest.fixture
def _installed():
    """PyG's names are ours, on the CPU."""
    pyg_direct.install(device="cpu")
    yield
    pyg_direct.uninstall()
