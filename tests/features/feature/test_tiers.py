"""Hot rows in GPU memory over all rows in host memory."""

import warnings

import pytest
import torch

from pyg_direct import CSRTopo, Feature
from pyg_direct.errors import DeviceError, ForkedProcessError, IdError, PlacementWarning
from pyg_direct.runtime.cuda import memory
from tests.poison import poisoned_memory

pytestmark = pytest.mark.gpu

PLACEMENTS = ["unified", "pinned"]
# Node 7 is listed by eight rows, 3 by two, 5 by one.
LISTS = torch.tensor([[7, 7, 7, 7, 7, 7, 7, 7, 3, 3, 5], [0, 1, 2, 3, 4, 5, 6, 8, 0, 1, 0]])


def make_table(num_rows=40, width=8):
    return torch.arange(num_rows * width, dtype=torch.float32).view(num_rows, width) + 1


def refuse(monkeypatch, placements):
    """Let the allocation of these placements fail."""
    allocate = memory.allocate

    def allocate_or_fail(num_bytes, placement, *args, **kwargs):
        if placement in placements:
            raise DeviceError(f"no {placement} memory here")
        return allocate(num_bytes, placement, *args, **kwargs)

    monkeypatch.setattr(memory, "allocate", allocate_or_fail)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_table_becomes_a_view_of_the_placed_rows(placement):
    table = make_table()
    before = table.clone()

    feature = Feature(placement=placement).from_cpu_tensor(table)

    assert torch.equal(table, before)
    assert (feature.placement, feature.num_hot_rows) == (placement, 0)
    table[3] = -7
    assert feature[[3, 4]].tolist() == [[-7.0] * 8, before[4].tolist()]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_one_read_takes_hot_rows_from_the_gpu_and_the_others_from_the_host(placement):
    table = make_table()
    expected = table.clone()
    feature = Feature(csr_topo=CSRTopo(LISTS, num_nodes=40), device_cache_size="96B", placement=placement)
    feature.from_cpu_tensor(table)
    # The host's copies of hot rows are not read.
    table.zero_()
    expected[[i for i in range(40) if i not in (3, 5, 7)]] = 0
    ids = torch.randint(40, (1000,), device="cuda")

    with poisoned_memory():
        got = feature[ids]

    assert feature.num_hot_rows == 3
    assert torch.equal(got.cpu(), expected[ids.cpu()])


@pytest.mark.parametrize(
    ("size", "rows"), [(0, 0), ("31B", 0), ("32B", 1), ("20%", 8), (1279, 39), (1280, 40), ("1G", 40)]
)
def test_the_cache_holds_the_rows_that_fit(size, rows):
    table = make_table()

    feature = Feature(device_cache_size=size).from_cpu_tensor(table)

    assert feature.num_hot_rows == rows
    assert feature.placement == ("cuda" if rows == 40 else "unified")
    assert torch.equal(feature[torch.arange(40)].cpu(), make_table())


def test_rows_on_the_gpu_stay_there():
    table = make_table().cuda()

    feature = Feature().from_cpu_tensor(table)

    table[3] = -7
    assert feature[[3]].tolist() == [[-7.0] * 8]
    assert (feature.placement, feature.num_hot_rows) == ("cuda", 40)


@pytest.mark.parametrize("cache", [0, "20%", "100%"])
@pytest.mark.parametrize("bad", [40, -1, 2**40])
def test_a_bad_id_on_the_gpu_is_told_at_the_next_use(cache, bad):
    feature = Feature(device_cache_size=cache).from_cpu_tensor(make_table())
    ids = torch.tensor([3, 39, bad, 0, bad], device="cuda")

    with poisoned_memory():
        got = feature[ids].tolist()

    expected = make_table()[[3, 39, 0, 0, 0]]
    expected[[2, 4]] = 0
    assert got == expected.tolist()
    with pytest.raises(IdError, match=r"must lie in \[0, 40\); an earlier read had an id outside at position 2"):
        feature[ids[:1]]
    assert feature[ids[:1]].tolist() == make_table()[[3]].tolist()


def test_a_bad_id_on_the_gpu_is_told_when_waited_for():
    feature = Feature(device_cache_size="20%").from_cpu_tensor(make_table())
    feature[torch.tensor([40], device="cuda")]

    with pytest.raises(IdError, match="position 0"):
        feature.synchronize()

    feature.synchronize()
    assert feature[[39]].tolist() == make_table()[[39]].tolist()


def test_a_cache_larger_than_the_free_memory_shrinks(monkeypatch):
    monkeypatch.setattr("pyg_direct.features.hot_rows.free_bytes", lambda index: 400)

    with pytest.warns(PlacementWarning, match="device_cache_size='1G' is more than the free memory") as caught:
        feature = Feature(device_cache_size="1G").from_cpu_tensor(make_table())

    assert [warning.filename for warning in caught] == [__file__]
    assert feature.num_hot_rows == 360 // 32
    assert torch.equal(feature[torch.arange(40)].cpu(), make_table())


def test_without_unified_memory_rows_are_page_locked(monkeypatch):
    refuse(monkeypatch, {"unified"})

    with pytest.warns(PlacementWarning, match="fell back to 'pinned' .*no unified memory here"):
        feature = Feature(device_cache_size="20%").from_cpu_tensor(make_table())

    assert (feature.placement, feature.num_hot_rows) == ("pinned", 8)
    assert torch.equal(feature[torch.arange(40, device="cuda")].cpu(), make_table())


def test_without_memory_the_gpu_can_read_the_cpu_gathers(monkeypatch):
    refuse(monkeypatch, {"unified", "pinned"})

    with pytest.warns(PlacementWarning, match="fell back to 'cpu'") as caught:
        feature = Feature(device_cache_size="20%").from_cpu_tensor(make_table())

    assert len(caught) == 1
    assert (feature.placement, feature.num_hot_rows) == ("cpu", 0)
    got = feature[torch.arange(40, device="cuda")]
    assert got.is_cuda
    assert torch.equal(got.cpu(), make_table())
    with pytest.raises(IdError, match="got 40"):
        feature[torch.tensor([40], device="cuda")]


def test_features_over_one_table_share_its_placed_rows():
    table = make_table()

    with warnings.catch_warnings(), poisoned_memory():
        features = [Feature(device_cache_size=size).from_cpu_tensor(table) for size in (0, "20%")]

    table[39] = -7
    assert [feature[[39]].tolist() for feature in features] == [[[-7.0] * 8]] * 2


def test_a_read_on_another_stream_is_ordered_after_its_ids():
    feature = Feature(device_cache_size="20%").from_cpu_tensor(make_table(num_rows=4000))
    stream = torch.cuda.Stream()

    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        ids = torch.arange(4000, device="cuda")
        got = feature[ids]
    stream.synchronize()

    assert torch.equal(got.cpu(), make_table(num_rows=4000))


def test_rows_are_refused_in_a_forked_child(monkeypatch):
    feature = Feature(device_cache_size="20%").from_cpu_tensor(make_table())
    monkeypatch.setattr(feature.stored.tier.block, "_process", -1)

    with pytest.raises(ForkedProcessError, match="spawn"):
        feature[[0]]


@pytest.mark.parametrize("cache", [0, "20%"])
def test_rows_that_nobody_else_sees_are_given_back_while_they_are_moved(cache, monkeypatch):
    table = torch.ones((memory._RELEASE_BYTES + memory._FILL_BYTES) // 4 // 64 + 1, 64)
    released = []
    monkeypatch.setattr(memory, "give_back", lambda piece: released.append(piece.numel() * 4))

    Feature(device_cache_size=cache).from_cpu_tensor(table)

    assert sum(released) == table.numel() * 4
