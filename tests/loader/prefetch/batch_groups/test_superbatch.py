"""Rows that several batches share are read once, and no batch differs for it."""

import warnings

import pytest
import torch

from pyg_direct import NeighborLoader
from pyg_direct.errors import ArgumentError, PlacementWarning
from pyg_direct.features.feature import Feature
from pyg_direct.loader.prefetch import batch_groups
from pyg_direct.loader.prefetch.batch_groups import SharedFetch, SuperBatch, split_group
from pyg_direct.sampling.sampling_options import Sample
from tests.batches import hash_batches, make_data
from tests.graphs import make_random_graph

NUM_NODES = 50
LISTS = [[3, 1, 4, 1], [9, 4], [], [0, 49, 3]]
ROW_BYTES = 3 * 4


def make_samples(device, lists=LISTS):
    none = torch.empty(0, dtype=torch.int64, device=device)
    return [Sample(torch.tensor(ids, dtype=torch.int64, device=device), none.view(2, 0), none, [len(ids)], [0])
            for ids in lists]  # fmt: skip


def make_feature(device):
    rows = torch.arange(NUM_NODES * 3, dtype=torch.float32).view(NUM_NODES, 3)
    return Feature(device=device).from_cpu_tensor(rows)


# Room for all four batches, for three of them, and for one.
@pytest.mark.parametrize(("most_rows", "num_rows_read"), [(None, 6), (12, 4 + 3), (0, 4 + 2 + 0 + 3)])
def test_each_batch_gets_the_rows_it_would_read_itself(device, most_rows, num_rows_read):
    feature = make_feature(device)
    fetch = SharedFetch({"x": feature}, None if most_rows is None else most_rows * ROW_BYTES)

    got = list(fetch(make_samples(device)))

    assert [sample.n_id.tolist() for sample, _ in got] == LISTS
    for sample, shared in got:
        rows = shared["x"].read(sample.n_id) if shared else feature[sample.n_id]
        assert torch.equal(rows, feature[sample.n_id])
    assert fetch.num_rows_read == num_rows_read


def test_without_features_nothing_is_shared(device):
    got = list(SharedFetch({})(make_samples(device)))

    assert [shared for _, shared in got] == [{}] * 4


def test_memory_that_runs_out_halves_the_group(device, monkeypatch):
    feature = make_feature(device)

    def unite_few(lists, num_nodes):
        if len(lists) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return real(lists, num_nodes)

    real = batch_groups.unite
    monkeypatch.setattr(batch_groups, "unite", unite_few)
    fetch = SharedFetch({"x": feature})

    with pytest.warns(PlacementWarning, match="rows of 4 batches together; half as many are tried"):
        got = list(fetch(make_samples(device)))

    assert fetch.num_rows_read == 4 + 3
    assert all(torch.equal(shared["x"].read(sample.n_id), feature[sample.n_id]) for sample, shared in got)


@pytest.mark.parametrize(("counts", "most_rows", "parts"), [
    ([5, 5, 5], 1000, [3]),
    ([5, 5, 5], 20, [2, 1]),
    ([5, 5, 5], 0, [1, 1, 1]),
    ([90, 90, 90], 370, [3]),
    ([90, 90, 90], 369, [2, 1]),
    ([7], 0, [1]),
])  # fmt: skip
def test_parts_hold_what_fits(counts, most_rows, parts):
    got = list(split_group(counts, 100, most_rows))

    assert [part.stop - part.start for part in got] == parts
    assert [at for part in got for at in range(part.start, part.stop)] == list(range(len(counts)))


def test_groups_keep_the_order_of_the_work():
    group = SuperBatch(3, submit=lambda number, positions: make_samples("cpu", [[number]])[0],
                       fetch=lambda sample, number, positions, shared: (number, sample.n_id.tolist()),
                       shared=SharedFetch({}))  # fmt: skip
    work = ((number, torch.tensor([number])) for number in range(5, 12))

    made = [group.fetch(group.submit(*item).finish(), *item) for item in group.group(work)]

    assert [[number for number, _ in batches] for batches in made] == [[5, 6, 7], [8, 9, 10], [11]]
    assert all(ids == [number] for batches in made for number, ids in batches)


@pytest.mark.parametrize("value", [0, -1, 2.0, True])
def test_bad_sizes_are_refused(value):
    with pytest.raises(ArgumentError, match="super_batch must be an integer of at least 1, got"):
        NeighborLoader(make_data(), [2], device="cpu", super_batch=value)


def make_loader(device, **options):
    data = make_data(make_random_graph(3000, 60_000), x=torch.arange(3000 * 64).view(3000, 64).float(),
                     other=torch.arange(3000 * 5).view(3000, 5).short())  # fmt: skip
    return NeighborLoader(data, [7, 5], batch_size=64, shuffle=True, seed=11, device=device, **options)


@pytest.mark.parametrize("options", [
    {"placement": "unified"},
    {"placement": "pinned", "prefetch": 0},
    {"placement": "unified", "prefetch": 3, "feature_cache": "20%"},
    {"placement": "unified", "sampling": "labor"},
    {"placement": "unified", "transform_sampler_output": lambda out: out},
    {"placement": "cuda"},
], ids=["unified", "pinned", "cached", "labor", "transformed", "all on the GPU"])  # fmt: skip
@pytest.mark.gpu
def test_batches_are_those_that_come_without(options):
    expected = hash_batches(make_loader("cuda", **options))

    with warnings.catch_warnings():
        warnings.simplefilter("error", PlacementWarning)
        got = hash_batches(make_loader("cuda", super_batch=4, **options))

    assert got == expected


def test_the_cpu_ignores_them(real_device):
    placement = "unified" if real_device.type == "cuda" else "cpu"

    batches = list(make_loader(real_device, placement=placement, super_batch=7))

    assert hash_batches(batches) == hash_batches(make_loader("cpu"))


def test_an_epoch_is_resumed_inside_a_group(real_device):
    loader = make_loader(real_device, super_batch=4)
    rest = iter(loader)
    for _ in range(6):
        next(rest)
    state = loader.state_dict()
    expected = hash_batches(rest)

    again = make_loader(real_device, super_batch=4)
    again.load_state_dict(state)

    assert hash_batches(again) == expected
