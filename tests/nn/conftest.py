"""Which calls of our operator accelerated convolutions make."""

import pytest

from pyg_direct.nn import attention, gcn, gin, propagate, root


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

    def count_attention(*args, **kwargs):
        made.append("sum")
        return attend(*args, **kwargs)

    attend = attention.attend
    monkeypatch.setattr(attention, "attend", count_attention)

    for module, name in ((root, "convolve"), (gin, "add_own"), (propagate, "sum_messages")):
        monkeypatch.setattr(module, name, _count_layers(made, getattr(module, name)))
    return made


def _count_layers(made, layer):
    def count(*args, **kwargs):
        made.append(kwargs["reduce"])
        return layer(*args, **kwargs)

    return count
