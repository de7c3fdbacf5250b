"""Features of many types, read by the ids of several batches, are those that each would give."""

import pytest
import torch

from pyg_direct import NeighborLoader
from pyg_direct.features.feature import Feature
from pyg_direct.features.multi_read import TypedRows
from pyg_direct.loader.batch_sampler import Seeds
from tests.hetero_data import make_hetero
from tests.loader.prefetch.batch_groups.test_together import OPTIONS, list_epoch, make_loader

SIZES = {"a": 40, "b": 7, "c": 90, "d": 5}
FORMS = {("a", "x"): (torch.float32, (8,)), ("c", "x"): (torch.float32, (8,)), ("d", "x"): (torch.float32, (8,)),
         ("b", "y"): (torch.int64, ()), ("a", "y"): (torch.int64, ()), ("b", "x"): (torch.float32, (3,))}  # fmt: skip


def make_features(device):
    return {(kind, key): Feature(device=device, device_cache_size="100%").from_cpu_tensor(
        (100 * torch.rand(SIZES[kind], *row)).to(dtype)) for (kind, key), (dtype, row) in FORMS.items()}  # fmt: skip


@pytest.mark.parametrize("num_batches", [1, 3])
def test_rows_are_those_of_each_feature(real_device, num_batches):
    features = make_features(real_device)
    typed = TypedRows(features, list(SIZES))
    sizes = [number * 5 % 13 for number in range(len(SIZES) * num_batches)]
    lists = [
        torch.randint(size, (count,)) for count, size in zip(sizes, list(SIZES.values()) * num_batches, strict=True)
    ]

    rows, memory = typed.read(torch.cat(lists).to(real_device), sizes)

    # Alone in its form.
    assert typed.names == set(FORMS) - {("b", "x")}
    assert len(memory) == 2
    for number, own in enumerate(rows):
        assert set(own) == typed.names
        for kind, key in own:
            ids = lists[number * len(SIZES) + list(SIZES).index(kind)].to(real_device)
            assert torch.equal(own[kind, key], features[kind, key][ids])


def test_reads_are_counted(real_device):
    features = make_features(real_device)
    features["c", "x"].count_served()
    typed = TypedRows(features, list(SIZES))

    typed.read(torch.zeros(18, dtype=torch.int64, device=real_device), [1, 2, 4, 0, 0, 3, 7, 1])

    assert features["c", "x"].tell().num_read == 4 + 7


def test_rows_that_have_moved_are_read_where_they_lie():
    features = make_features("cpu")
    typed = TypedRows(features, list(SIZES))
    ids, sizes = torch.tensor([1, 2, 3]), [1, 0, 2, 0]
    expected, _ = typed.read(ids, sizes)

    features["a", "x"].stored.tier.table.share_memory_()
    features["c", "x"].share_ipc()
    features["c", "x"].stored.tier.table.add_(1)
    (got,), _ = typed.read(ids, sizes)

    assert torch.equal(got["a", "x"], expected[0]["a", "x"])
    assert torch.equal(got["c", "x"], expected[0]["c", "x"] + 1)


def test_nothing_is_read_together_where_no_two_tables_are_alike(real_device):
    features = make_features(real_device)
    typed = TypedRows({("b", "x"): features["b", "x"]}, list(SIZES))

    assert typed.read(torch.zeros(0, dtype=torch.int64), [0] * 8) == ([{}, {}], [])


@pytest.mark.parametrize("super_batch", [1, 4])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.filterwarnings("ignore:.*has no reverse relation")
def test_batches_have_the_same_rows(option, super_batch, monkeypatch):
    def make(**options):
        loader = make_loader("cpu", option, **options)
        for store in loader.data.node_stores:
            store.label = torch.arange(100, 100 + store.num_nodes)
        return loader

    with monkeypatch.context() as patch:
        patch.setattr(TypedRows, "read", lambda typed, ids, sizes, *_: ([{}] * (len(sizes) // len(typed._types)), []))
        expected = list_epoch(make())
    read = []
    real = TypedRows.read
    monkeypatch.setattr(TypedRows, "read", lambda typed, *args: read.append(len(typed.names)) or real(typed, *args))

    got = list_epoch(make(super_batch=super_batch))

    assert got == expected
    # Edges that were merged are packed no more, and induced batches are made one by one.
    calls = {"bidirectional": 0, "induced": 6}.get(option, 6 if super_batch == 1 else 2)
    # Of nodes and of edges.
    assert len(read) == 2 * calls
    assert all(number >= 4 for number in read)


def test_a_batch_of_a_group_is_made_alone_too():
    data = make_hetero()
    loader = NeighborLoader(data, [3, 2], "paper", batch_size=4, device="cpu", seed=1)
    loader._prepare()
    seeds = [Seeds(own, own) for own in (torch.arange(4), torch.arange(4, 9))]
    first, second = loader._submit_together(seeds, [5, 6]).finish()

    for out in (second, first):
        assert torch.equal(loader._build(out, [])["paper"].x, data["paper"].x[out.node["paper"]])
