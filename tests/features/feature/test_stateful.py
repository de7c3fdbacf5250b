"""A feature is read, written, renamed and sent in any order, and always equals a plain table."""

import tempfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pyg_direct import Feature, save_rows
from pyg_direct.errors import ArgumentError, IdError
from tests.conftest import DEVICES

COUNT = 23
IDS = st.lists(st.integers(0, COUNT - 1), max_size=40)
SIZES = st.sampled_from([0, "20%", "60%", "1G"])


class FeatureMachine(RuleBasedStateMachine):
    """Runs beside a tensor."""

    device = torch.device("cpu")

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()

    @initialize(in_file=st.booleans(), hot=SIZES, warm=SIZES, width=st.sampled_from([(), (1,), (5,), (2, 3)]))
    def fill(self, in_file, hot, warm, width):
        self.table = torch.arange(COUNT * torch.Size(width).numel()).view(COUNT, *width).float()
        self.feature = Feature(device=self.device, device_cache_size=hot, host_cache_size=warm if in_file else 0)
        if in_file:
            self.feature.from_file(save_rows(Path(self.folder.name) / "rows.npy", self.table))
        else:
            self.feature.from_cpu_tensor(self.table.clone())
        self.is_file = self.feature.placement == "mmap"
        self.counted = None

    def note(self, ids):
        if self.counted is not None:
            self.counted += len(ids)

    @rule(ids=IDS, as_list=st.booleans())
    def read(self, ids, as_list):
        got = self.feature[ids if as_list else torch.tensor(ids, dtype=torch.int32)]

        self.note(ids)
        assert torch.equal(got.cpu(), self.table[torch.tensor(ids).long()])

    @rule(ids=IDS, bad=st.sampled_from([-1, COUNT, 2**40]))
    def read_what_is_not_there(self, ids, bad):
        with pytest.raises(IdError, match=str(COUNT)):
            self.feature[[*ids, bad]]

    @precondition(lambda self: not self.is_file)
    @rule(ids=IDS, start=st.integers(-99, 99))
    def update(self, ids, start):
        rows = start + torch.arange(len(ids) * self.table[0].numel()).view(len(ids), *self.table.shape[1:]).float()

        self.feature.update_(ids, rows)

        for item, row in zip(ids, rows, strict=True):
            self.table[item] = row

    @precondition(lambda self: self.is_file)
    @rule(ids=IDS)
    def update_a_file(self, ids):
        with pytest.raises(ArgumentError, match="read-only"):
            self.feature.update_(ids, self.table[torch.tensor(ids).long()])

    @precondition(lambda self: not self.is_file)
    @rule(bad=st.sampled_from([-1, COUNT]), ids=IDS)
    def update_what_is_not_there(self, bad, ids):
        with pytest.raises(IdError):
            self.feature.update_([*ids, bad], torch.zeros(len(ids) + 1, *self.table.shape[1:]))

    @rule()
    def count(self):
        self.feature.count_served()
        self.counted = 0

    @precondition(lambda self: not self.is_file)
    @rule()
    def fill_anew(self):
        self.table = self.table + 1
        self.feature.from_cpu_tensor(self.table.clone())

    @rule()
    def report(self):
        with redirect_stdout(StringIO()) as printed:
            found = self.feature.report()

        assert sum(tier.num_rows for tier in found.tiers) == COUNT
        assert {tier.num_read is None for tier in found.tiers} == {self.counted is None}
        assert found.num_read == (self.counted or 0)
        assert str(found) in printed.getvalue()

    @invariant()
    def it_says_what_it_holds(self):
        if hasattr(self, "feature"):
            assert self.feature.shape == self.table.shape
            assert 0 <= self.feature.num_hot_rows <= COUNT
            assert str(COUNT) in repr(self.feature)

    def teardown(self):
        self.folder.cleanup()


@pytest.mark.parametrize("device", DEVICES)
def test_any_order_of_calls(device):
    machine = type("Machine", (FeatureMachine,), {"device": torch.device(device)})

    machine.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
    machine.TestCase().runTest()
