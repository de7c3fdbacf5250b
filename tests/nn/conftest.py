"""Which calls of our operator accelerated convolutions make."""

import pytest

from pyg_direct.nn import attention, gcn, propagate, root


@pytest.fixture
def calls(monkeypatch):
    """Reduces our operator was asked for by convolutions."""
    made = []

    def count(*args, **kwargs):
        made.append(kwargs.get("reduce", "sum"))
        return aggregate(*args, **kwargs)

    aggregate = propagate.aggregate
    for module in (propagate, gcn, attention):
        monkeypatch.setattr(module, "aggregate", count)

    def count_layer(*args, **kwargs):
        made.append(kwargs["reduce"])
        return convolve(*args, **kwargs)

    convolve = root.convolve
    monkeypatch.setattr(root, "convolve", count_layer)
    return made
