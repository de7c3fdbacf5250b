"""Both ways in which a batch is joined on a CPU: a test that asks for `joining` runs by torch and by the loops."""

import pytest

from tests.loader.data_loader.small_graphs import joined_by


@pytest.fixture(params=["torch", "loops"])
def joining(request):
    with joined_by(request.param):
        yield request.param
