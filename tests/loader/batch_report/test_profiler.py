"""A loader notes where the time of its batches went, and tells."""

import itertools
import pickle
import time
import weakref
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch_geometric.testing import MyGraphStore

from pyg_direct import (
    ClusterData,
    ClusterLoader,
    FeatureStore,
    GraphSAINTRandomWalkSampler,
    HGTLoader,
    LinkNeighborLoader,
    NeighborLoader,
    NodeLoader,
    RandomNodeLoader,
    ShaDowKHopSampler,
    SubGraphLoader,
)
from pyg_direct.errors import ArgumentError
from pyg_direct.loader import NeighborSampler as LayerLoader
from pyg_direct.loader.batch_report import RANGES
from pyg_direct.sampler import NeighborSampler
from tests.batches import hash_batches, make_data
from tests.hetero_data import make_hetero

NUM_BATCHES = 5
PREFETCH = [0, 1, 3]
DELAY = 0.05
# Clocks differ.
LEAST = 0.9 * DELAY


def make_loader(device="cpu", **options):
    return NeighborLoader(make_data(), [3, 2], **{"batch_size": 16, "seed": 1, "device": device, **options})


def make_stores(device):
    data, features, graph = make_data(), FeatureStore(device), MyGraphStore()
    features.put_tensor(data.x, group_name="node", attr_name="x", index=None)
    graph.put_edge_index(data.edge_index, edge_type=("node", "to", "node"), layout="coo", size=(70, 70))
    return NeighborLoader((features, graph), [3], "node", batch_size=16, device=device)


LOADERS = {
    "plain": make_loader,
    "general": lambda device: make_loader(device, disjoint=True),
    # The times of batches that are sampled together are those of the first.
    "types": lambda device: NeighborLoader(make_hetero(), [3, 2], "paper", batch_size=16, super_batch=1, device=device),
    "links": lambda device: LinkNeighborLoader(make_data(), [3], neg_sampling="binary", batch_size=200, device=device),
    "hgt": lambda device: HGTLoader(make_hetero(), [8, 8], "paper", batch_size=16, device=device),
    "shadow": lambda device: ShaDowKHopSampler(make_data(), 2, 3, batch_size=16, device=device),
    "induced": lambda device: SubGraphLoader(make_data(), torch.arange(70), [3], batch_size=16, device=device),
    "sampler": lambda device: NodeLoader(make_data(), NeighborSampler(make_data(), [3], device=device), batch_size=16),
    "clusters": lambda device: ClusterLoader(ClusterData(make_data(), 5, log=False), device=device),
    "parts": lambda device: RandomNodeLoader(make_data(), 5, device=device),
    "parts with types": lambda device: RandomNodeLoader(make_hetero(), 5, device=device),
    "walks": lambda device: GraphSAINTRandomWalkSampler(make_data(), 5, 2, num_steps=5, device=device),
    "layers": lambda device: LayerLoader(make_data().edge_index, [3, 2], batch_size=16, device=device),
    "stores": make_stores,
}


@pytest.mark.parametrize("name", LOADERS)
def test_every_loader_tells_of_its_batches(real_device, name):
    loader = LOADERS[name](real_device)
    loader.record()
    num_batches = sum(1 for _ in loader)

    report = loader.report()

    assert report.num_batches == report.num_timed == num_batches > 1
    # Batches that a GPU makes together are timed as one, with the first of them.
    least = 1 if real_device.type == "cuda" and name in ("clusters", "parts", "walks") else num_batches
    for lane in ("sample", "fetch"):
        assert least <= len(report.seconds(lane)) <= num_batches
    for lane in ("wait", "train"):
        assert len(report.seconds(lane)) == num_batches
    assert str(report).startswith("topology")
    assert (name == "layers") == (not report.features)
    assert not report.features or any(part.num_read > 0 for part in report.features.values())


@pytest.mark.parametrize("prefetch", PREFETCH)
def test_a_batch_is_sampled_then_fetched_then_handed_out(real_device, prefetch):
    loader = make_loader(real_device, prefetch=prefetch)
    loader.record()
    list(loader)

    spans = [span for span in loader.report().spans if span.where == "host"]

    for number in range(NUM_BATCHES):
        of_batch = {span.lane: span for span in spans if span.batch == number}
        sampled = [span for span in spans if span.batch == number and span.lane == "sample"]
        assert len(sampled) == 2
        assert sampled[0].end <= sampled[1].begin
        assert sampled[1].end <= of_batch["fetch"].begin < of_batch["fetch"].end <= of_batch["wait"].end
        assert of_batch["wait"].end == of_batch["train"].begin
    assert min(span.begin for span in spans) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("prefetch", PREFETCH)
def test_the_gpu_begins_nothing_before_the_host_asks(prefetch):
    loader = make_loader("cuda", prefetch=prefetch)
    # Two clocks drift apart while kernels are compiled.
    list(loader)
    loader.record()
    for batch in loader:
        batch.x.sum()

    spans = loader.report().spans

    asked = {}
    for span in spans:
        if span.where == "host":
            asked[span.lane, span.batch] = min(span.begin, asked.get((span.lane, span.batch), span.begin))
    begun = [span for span in spans if span.where == "GPU" and span.lane != "train"]
    assert len(begun) == 3 * NUM_BATCHES
    # Events are told to half a microsecond.
    assert all(span.begin >= asked[span.lane, span.batch] - 1e-6 for span in begun)


def test_time_is_told_where_it_is_spent():
    def slow_fetch(out):
        time.sleep(DELAY)
        return out

    loader = make_loader(prefetch=0, transform_sampler_output=slow_fetch)
    loader.record()
    for _ in loader:
        time.sleep(2 * DELAY)

    report = loader.report()

    assert min(report.seconds("fetch")) >= LEAST
    assert min(report.seconds("wait")) >= LEAST
    assert min(report.seconds("train")) >= 2 * LEAST
    assert min(report.seconds("sample")) < LEAST


def test_only_the_last_batches_are_kept(real_device):
    loader = make_loader(real_device)
    loader.record(last=3)

    for _ in range(2):
        list(loader)

    report = loader.report()
    assert (report.num_batches, report.num_timed) == (2 * NUM_BATCHES, 3)
    assert len(report.seconds("wait")) == 3
    assert len(loader._recorder.done) == 3


@pytest.mark.parametrize("prefetch", PREFETCH)
def test_batches_are_the_same(real_device, prefetch):
    expected = hash_batches(make_loader(real_device, shuffle=True))
    loader = make_loader(real_device, shuffle=True, prefetch=prefetch)
    loader.record()

    assert hash_batches(loader) == expected


def test_epochs_side_by_side_are_told_apart():
    loader = make_loader()
    loader.record()

    list(zip(loader, loader, strict=True))

    report = loader.report()
    assert report.num_batches == len(report.seconds("fetch")) == 2 * NUM_BATCHES


def test_an_epoch_left_early_has_the_batches_that_were_used(real_device):
    loader = make_loader(real_device, prefetch=2)
    loader.record()

    first = list(itertools.islice(loader, 2))

    assert loader.report().num_batches == len(first) == 2
    assert list(loader)
    assert loader.report().num_batches == 2 + NUM_BATCHES


def test_an_error_is_raised_as_without():
    def fail(out):
        if next(calls) == 2:
            raise KeyError("third")
        return out

    calls = itertools.count()
    loader = make_loader(transform_sampler_output=fail, prefetch=0)
    loader.record()

    with pytest.raises(KeyError, match="third"):
        list(loader)

    assert loader.report().num_batches == 2


def test_a_used_batch_is_not_kept():
    loader = make_loader(prefetch=0)
    loader.record()
    alive = []

    for batch in loader:
        alive.append(weakref.ref(batch))
        del batch
        # The generators may hold the newest.
        assert sum(ref() is not None for ref in alive) <= 1


def test_worker_processes_are_waited_for(monkeypatch):
    made = list(make_loader())
    loader = make_loader(num_workers=1, multiprocessing_context="spawn")
    # What they would make.
    monkeypatch.setattr(loader, "_work_with_workers", lambda epoch, batches: iter(made))
    loader.record()
    list(loader)

    report = loader.report()

    assert len(report.seconds("wait")) == len(report.seconds("train")) == NUM_BATCHES
    assert report.seconds("sample") == []


def test_nothing_is_noted_unless_asked_for():
    loader = make_loader()
    list(loader)

    report = loader.report()

    assert (report.num_batches, report.spans, report.features) == (0, [], {})
    assert str(report).endswith("no batches were recorded: call record() before an epoch")


def test_recording_ends():
    loader = make_loader()
    loader.record()
    list(loader)
    features = loader.report().features

    loader.record(False)
    list(loader)

    assert features["x"].num_read > 0
    assert loader.report().num_batches == 0
    assert loader._general.describe()["x"].report().tiers[0].num_read is None


def test_a_loader_that_is_sent_records_nothing():
    loader = make_loader()
    loader.record()
    list(loader)

    sent = pickle.loads(bytes(ForkingPickler.dumps(loader)))

    assert len(list(sent)) == NUM_BATCHES
    assert sent.report().num_batches == 0


@pytest.mark.parametrize("last", [0, -1, 2.0, True, "3"])
def test_what_is_no_number_of_batches_is_refused(last):
    with pytest.raises(ArgumentError, match="last must be an integer of at least 1"):
        make_loader().record(last=last)


def names_in_profile(loader):
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found:
        list(loader)
    return {event.key: event.count for event in found.key_averages() if event.key.startswith("pyg_direct.")}


def test_the_profiler_shows_the_stages():
    loader = make_loader(prefetch=0)

    assert names_in_profile(loader) == {}
    loader.record()
    found = names_in_profile(loader)

    # A sample is started and finished; the last wait finds that nothing is left.
    assert found == {"pyg_direct.sample": 2 * NUM_BATCHES, "pyg_direct.fetch": NUM_BATCHES,
                     "pyg_direct.wait": NUM_BATCHES + 1}  # fmt: skip
    assert set(found) == set(RANGES)


def test_a_profiler_may_come_and_go():
    loader = make_loader(prefetch=0)
    loader.record()
    batches = iter(loader)
    next(batches)

    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found:
        next(batches)
        next(batches)

    assert len(list(batches)) == NUM_BATCHES - 3
    assert {e.key: e.count for e in found.key_averages() if e.key in RANGES}["pyg_direct.wait"] == 2


def test_nvtx_is_left_alone_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: pytest.fail("pushed"))
    loader = make_loader()
    loader.record(nvtx=True)

    assert len(list(loader)) == NUM_BATCHES


@pytest.mark.gpu
@pytest.mark.parametrize("prefetch", PREFETCH)
@pytest.mark.parametrize("super_batch", [1, 2])
def test_times_of_the_gpu(prefetch, super_batch):
    loader = make_loader("cuda", prefetch=prefetch, super_batch=super_batch, placement="unified")
    loader.record(last=7)
    for _ in range(3):
        for batch in loader:
            batch.x.sum()

    report = loader.report()

    assert len(report.seconds("wait", "GPU")) == 7
    assert 5 <= len(report.seconds("train", "GPU")) <= 7
    for lane in ("sample", "fetch"):
        assert len(report.seconds(lane, "GPU")) >= 7 // super_batch
        assert all(seconds > 0 for seconds in report.seconds(lane, "GPU"))
    assert "GPU: wait" in str(report)


@pytest.mark.gpu
def test_bytes_over_the_link():
    loader = make_loader("cuda", placement="unified", feature_cache=0)
    loader.record()
    num_rows = sum(batch.n_id.numel() for batch in loader)

    report = loader.report()

    assert report.features["x"].link_bytes("PCIe") == 20 * num_rows
    assert report.link_bytes("PCIe") >= 20 * num_rows
    assert report.link_bytes("NVLink") == 0


@pytest.mark.gpu
def test_nvtx_ranges_are_closed_again(monkeypatch):
    depth, names = [0], set()
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: (names.add(name), depth.append(depth[-1] + 1)))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: depth.append(depth[-1] - 1))
    loader = make_loader("cuda")
    loader.record(nvtx=True)

    list(loader)

    assert depth[-1] == 0
    assert min(depth) == 0
    assert names == set(RANGES)
