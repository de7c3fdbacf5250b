"""A graph, and the same in two parts."""

import pytest

from tests.distributed.ranks import make_data, write_data


@pytest.fixture
def data():
    return make_data()


@pytest.fixture
def folder(tmp_path, data):
    write_data(tmp_path / "p", data, 2, times=True, weights=True)
    return tmp_path / "p"
