"""Calls of the accelerated operators by accelerated convolutions."""

import pytest

from pyg_direct.nn import dispatch
from pyg_direct.nn.conv import gat, gcn, gin, gine, sage
from tests.nn.embeddings import place  # noqa: F401 (a fixture)


@pytest.fixture
def calls(monkeypatch):
    """Reduces our operator was asked for by convolutions."""
    made = []

    def count(*args, **kwargs):
        made.append(kwargs.get("reduce", "sum"))
        return aggregate(*args, **kwargs)

    aggregate = dispatch.aggregate
    for module in (dispatch, gcn, gat):
        monkeypatch.setattr(module, "aggregate", count)

    def count_attention(*args, **kwargs):
        made.append("sum")
        return attend(*args, **kwargs)

    attend = gat.attend
    monkeypatch.setattr(gat, "attend", count_attention)

    for module, name in ((sage, "convolve"), (gin, "add_own"), (gine, "sum_messages")):
        monkeypatch.setattr(module, name, _count_layers(made, getattr(module, name)))
    return made


def _count_layers(made, layer):
    def count(*args, **kwargs):
        made.append(kwargs["reduce"])
        return layer(*args, **kwargs)

    return count
