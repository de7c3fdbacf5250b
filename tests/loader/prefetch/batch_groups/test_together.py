"""Batches of a general sampler that are made together are those that come without."""

import gc
import io

import pytest
import torch
from torch_geometric.data import Data

from pyg_direct import NeighborLoader
from pyg_direct.compiler.jit import pause_collector
from pyg_direct.errors import IdError, PlacementWarning
from pyg_direct.loader.prefetch.batch_groups import GPU_ROOM, GrowingTogether, Together, count_bytes
from pyg_direct.loader.prefetch.drivers import Pipeline, note_memory
from pyg_direct.nn.sorted_edges import find_batch
from pyg_direct.sampler import NeighborSampler
from pyg_direct.sampling.captured_plan import Finished
from pyg_direct.sampling.hetero_plan import GeneralPlan
from tests.batches import make_data
from tests.hetero_data import check_rows, make_hetero
from tests.hetero_graphs import make_parts

OPTIONS = {
    "uniform": {},
    "disjoint": {"disjoint": True},
    "times": {"time_attr": "time", "temporal_strategy": "last"},
    "weights": {"weight_attr": "weight", "replace": True},
    "bidirectional": {"subgraph_type": "bidirectional"},
    "induced": {"subgraph_type": "induced"},
}
pytestmark = pytest.mark.filterwarnings("ignore:.*has no reverse relation")


def make_loader(device, option="times", **options):
    data = make_hetero(make_parts(times="node" if option == "times" else "", weighted=option == "weights"))
    common = {"batch_size": 7, "shuffle": True, "seed": 3, "device": device, **OPTIONS[option]}
    return NeighborLoader(data, [3, 2], "paper", **common | options)


def list_parts(batch):
    return [(store._key, {key: value.tolist() if isinstance(value, torch.Tensor) else value
                          for key, value in store.items()}) for store in batch.stores]  # fmt: skip


def list_epoch(loader):
    return [list_parts(batch) for batch in loader]


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("option", OPTIONS)
def test_batches_are_those_that_come_without(real_device, option, prefetch):
    expected = list_epoch(make_loader("cpu", option))

    got = list_epoch(make_loader(real_device, option, super_batch=4, prefetch=prefetch))

    assert len(got) == 6
    assert got == expected


def test_a_graph_without_types_too(real_device):
    data = make_data()
    options = {"disjoint": True, "batch_size": 16, "seed": 1}

    got = list(NeighborLoader(data, [3, 2], super_batch=3, device=real_device, **options))

    expected = list(NeighborLoader(data, [3, 2], device="cpu", **options))
    assert all(isinstance(batch, Data) for batch in got)
    assert list(map(list_parts, got)) == list(map(list_parts, expected))


def test_they_are_sampled_in_one_call(monkeypatch):
    loader, sizes = make_loader("cpu", super_batch=4), []
    ask = GeneralPlan.submit_together
    monkeypatch.setattr(
        GeneralPlan,
        "submit_together",
        lambda plan, requests, *rest: sizes.append(len(requests)) or ask(plan, requests, *rest),
    )

    list(loader)

    assert sizes == [4, 2]


def test_a_sampler_that_draws_its_own_way_is_asked_for_each():
    class Other(NeighborSampler):
        def sample_from_nodes(self, index, **options):
            asked.append(index.node.numel())
            return super().sample_from_nodes(index, **options)

    asked = []
    sampler = Other(make_hetero(), [3, 2], device="cpu", seed=3)

    list(make_loader("cpu", "uniform", neighbor_sampler=sampler, super_batch=4))

    assert asked == [7] * 5 + [5]


class TestGroupsThatGrow:
    """Nobody has to say how many batches are sampled in one call."""

    @pytest.fixture
    def sizes(self, monkeypatch):
        sizes, submit = [], Together.submit
        monkeypatch.setattr(
            Together, "submit", lambda group, number, work: sizes.append(len(work)) or submit(group, number, work)
        )
        return sizes

    def make(self, room=1 << 40, taken=1000, on_fetch=None):
        def fetch(sample, number, seeds, read):
            if on_fetch is not None:
                on_fetch(number)
            batch = Data()
            note_memory(batch, [torch.empty(taken, dtype=torch.uint8)])
            return batch

        self.asked = []
        return GrowingTogether(
            GPU_ROOM,
            lambda: room,
            lambda work: self.asked.append(len(work)) or Finished([number for number, _ in work]),
            lambda samples: [None] * len(samples),
            fetch,
            True,
        )

    def run(self, together, count=40):
        work = ((number, number) for number in range(count))
        for number, items in together.group(work):
            samples = together.finish(together.submit(number, items), number)
            yield from zip([n for n, _ in items], together.fetch(samples, number, items), strict=True)

    @pytest.mark.parametrize(
        ("room", "taken", "expected"),
        [
            (1 << 40, 1000, [1, 2, 4, 8, 16, 9]),
            (1 << 40, 100 << 20, [1, 2, 2, 2, 2, 2]),
            (16 * 5000, 1000, [1, 2, 4, 5, 5, 5]),
            (100, 1000, [1, 1, 1, 1, 1, 1]),
        ],
    )
    def test_they_double_while_they_are_small(self, room, taken, expected):
        together = self.make(room, taken)

        got = [number for number, _ in self.run(together)]

        assert got == list(range(40))
        assert self.asked[:6] == expected

    def test_what_batches_share_counts_once(self):
        shared, batches = torch.empty(100), [Data(x=torch.empty(5)), Data(), Data()]
        for batch in batches[1:]:
            note_memory(batch, [shared, shared[:7]])

        assert count_bytes(batches) == 420

    @pytest.mark.parametrize("what", ["submit", "fetch"])
    def test_a_group_that_does_not_fit_comes_batch_by_batch(self, real_device, what):
        left = [1]

        def fail(at, number):
            if at == what and number >= 7 and left:
                left.pop()
                raise torch.OutOfMemoryError("CUDA out of memory")

        together = self.make(on_fetch=lambda number: fail("fetch", number))
        submit = together.submit
        together.submit = lambda number, work: fail("submit", work[-1][0]) or submit(number, work)
        work = ((number, number) for number in range(20))
        pipeline = Pipeline(
            together.group(work),
            lambda number, items: Done(together.submit(number, items).finish()),
            together.fetch,
            1,
            real_device,
            lambda pending, number: pending,
            together.split,
        )
        pipeline.prefetch = 1

        with pytest.warns(PlacementWarning, match="ran out"):
            got = [(number, len(batches)) for number, batches in pipeline]

        assert [at + n for at, size in got for n in range(size)] == list(range(20))
        assert got[-1] == (19, 1)
        assert self.asked[-10:] == [1] * 10

    def test_batches_are_those_that_come_alone(self, real_device, sizes):
        for option in OPTIONS:
            expected = list_epoch(make_loader("cpu", option, super_batch=1))
            loader = make_loader(real_device, option)

            sizes.clear()
            first, second = list_epoch(loader), list_epoch(loader)

            assert first == expected
            assert second != first
            # On a GPU only batches of trees are sampled together by default.
            is_grouped = real_device.type == "cpu" or option in ("disjoint", "times")
            assert sizes == ([1, 2, 3] * 2 if is_grouped else [])

    def test_two_epochs_are_those_of_any_size(self, real_device):
        alone, sixteen = (make_loader(real_device, super_batch=size) for size in (1, 16))
        loader = make_loader(real_device)

        for _ in range(2):
            got = list_epoch(loader)

            assert got == list_epoch(alone) == list_epoch(sixteen)

    @pytest.mark.gpu
    def test_what_was_asked_to_be_made_ahead_stays(self):
        loader = make_loader("cuda", prefetch=3)

        list_epoch(loader)

        assert loader.prefetch == 3

    def test_an_epoch_is_resumed_inside_one(self, real_device):
        loader = make_loader(real_device)
        rest = iter(loader)
        for _ in range(2):
            next(rest)
        state = loader.state_dict()
        expected = [list_parts(batch) for batch in rest]

        again = make_loader(real_device)
        again.load_state_dict(state)

        assert len(expected) == 4
        assert list_epoch(again) == expected

    def test_nobody_has_to_ask_for_them(self, real_device, sizes):
        got = list_epoch(make_loader(real_device))

        assert sizes == [1, 2, 3]
        assert got == list_epoch(make_loader("cpu", super_batch=1))

    @pytest.mark.parametrize("options", [{"prefetch": 0}, {"transform_sampler_output": lambda out: out}])
    def test_they_are_not_where_batches_must_come_alone(self, real_device, sizes, options):
        list_epoch(make_loader(real_device, **options))

        assert sizes == []

    def test_nor_where_a_cpu_is_asked_for_several_at_once(self, sizes):
        list_epoch(make_loader("cpu", prefetch=2))

        assert sizes == []


class Done(list):
    """A group that was sampled."""

    def record_stream(self, stream):
        pass


@pytest.mark.parametrize("way", ["sampler output", "batch"])
def test_transforms_get_each_batch(way):
    seen = []
    name = "transform_sampler_output" if way == "sampler output" else "transform"
    loader = make_loader("cpu", super_batch=4, **{name: lambda part: seen.append(part) or part})

    got = list_epoch(loader)

    assert len(seen) == 6
    assert got == list_epoch(make_loader("cpu", **{name: lambda part: part}))


def test_an_epoch_is_resumed_inside_a_group(real_device):
    loader = make_loader(real_device, super_batch=4)
    rest = iter(loader)
    for _ in range(3):
        next(rest)
    state = loader.state_dict()
    expected = [list_parts(batch) for batch in rest]

    again = make_loader(real_device, super_batch=4)
    again.load_state_dict(state)

    assert list_epoch(again) == expected


def test_each_batch_is_kept_and_written_to_alone(real_device):
    loader = make_loader(real_device, super_batch=3)
    expected = list_epoch(make_loader("cpu"))

    kept = []
    for batch in loader:
        kept.append((batch, list_parts(batch)))
        for store in batch.stores:
            for value in store.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()

    assert [parts for _, parts in kept] == expected


def count_saved_bytes(batch):
    file = io.BytesIO()
    torch.save(batch, file)
    return file.tell()


def test_a_clone_is_saved_without_the_batches_that_its_batch_came_with(real_device):
    batch = list(make_loader(real_device, batch_size=2, super_batch=16))[3]
    alone = list(make_loader(real_device, batch_size=2, super_batch=1))[3]

    assert count_saved_bytes(batch) > 1.5 * count_saved_bytes(alone)
    assert count_saved_bytes(batch.clone()) < 1.1 * count_saved_bytes(alone.clone())


def test_edges_of_each_batch_are_known_to_be_sorted(real_device):
    for batch in list(make_loader(real_device, "uniform", super_batch=4)):
        for store in batch.edge_stores:
            assert find_batch(store.edge_index).shape == store.edge_index.shape


def test_rows_are_those_of_the_graph(real_device):
    data = make_hetero()

    for batch in NeighborLoader(data, [3, 2], "paper", batch_size=16, super_batch=2, device=real_device):
        check_rows(data, batch)


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_is_left_as_it_was(was_on):
    seen = []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "isenabled", lambda: was_on)
        patch.setattr(gc, "disable", lambda: seen.append("off"))
        patch.setattr(gc, "enable", lambda: seen.append("on"))
        with pytest.raises(KeyError), pause_collector():
            raise KeyError

    assert seen == (["off", "on"] if was_on else [])


def test_groups_of_a_gpu_are_made_without_the_collector(real_device):
    loader, seen = make_loader(real_device, super_batch=3), []
    submit, build = loader._submit_together, loader._build
    loader._submit_together = lambda *args: seen.append(gc.isenabled()) or submit(*args)
    loader._build = lambda *args: seen.append(gc.isenabled()) or build(*args)

    list(loader)

    assert set(seen) == {real_device.type == "cpu"}
    assert gc.isenabled()


def test_bad_positions_come_at_their_group():
    loader = make_loader("cpu", super_batch=2, shuffle=False, sampler=[0, 1, 2, 3, 77], batch_size=1)
    batches = iter(loader)

    for _ in range(4):
        next(batches)
    with pytest.raises(IdError, match=r"positions of input nodes, in \[0, 40\), got 77"):
        next(batches)
