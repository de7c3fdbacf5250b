"""The order of work around a fake sampler and a fake fetch."""

import pytest
import torch
from torch_geometric.data import Data, HeteroData

from pyg_direct.loader.prefetch.drivers import Pipeline, hold_for, note_memory, parts_of, take_memory
from pyg_direct.sampling.sampling_options import empty_sample

PREFETCH = [0, 1, 2, 5]
NUM_BATCHES = 4


class Recorder:
    """Work that notes when it is done; the batch number k holds 10 * k."""

    def __init__(self, device, prefetch, *, fail_in=None, fail_at=None, error=KeyError):
        self.notes = []
        self._fail, self._error = (fail_in, fail_at), error
        self.pipeline = Pipeline(self._work(), self._submit, self._fetch, prefetch, device)
        # The CPU makes nothing ahead; here it does, with the same order of work but without streams.
        self.pipeline.prefetch = prefetch
        self._device = device

    def _note(self, what, number):
        self.notes.append((what, number))
        if (what, number) == self._fail:
            raise self._error(f"{what} {number}")

    def _work(self):
        for number in range(NUM_BATCHES):
            self._note("work", number)
            yield number, torch.tensor([10 * number])

    def _submit(self, number, positions):
        self._note("submit", number)
        return empty_sample(positions.to(self._device), 1)

    def _fetch(self, sample, number, positions):
        self._note("fetch", number)
        return sample.n_id + positions.to(self._device) - sample.n_id

    def done(self, what):
        return [number for note, number in self.notes if note == what]


@pytest.mark.parametrize("prefetch", PREFETCH)
def test_batches_come_in_order(real_device, prefetch):
    recorder = Recorder(real_device, prefetch)

    got = [(number, batch.item()) for number, batch in recorder.pipeline]

    assert got == [(0, 0), (1, 10), (2, 20), (3, 30)]
    for what in ("work", "submit", "fetch"):
        assert recorder.done(what) == [0, 1, 2, 3]


@pytest.mark.parametrize("prefetch", PREFETCH)
def test_as_many_are_fetched_ahead_as_was_asked_for(real_device, prefetch):
    recorder = Recorder(real_device, prefetch)
    # On a GPU one more is on its way.
    on_its_way = 1 if real_device.type == "cuda" and prefetch > 0 else 0

    for number, _ in recorder.pipeline:
        fetched, submitted = len(recorder.done("fetch")), len(recorder.done("submit"))

        assert fetched == min(number + 1 + prefetch, NUM_BATCHES)
        assert submitted == min(number + 1 + prefetch + on_its_way, NUM_BATCHES)


def test_on_the_cpu_nothing_is_made_ahead():
    pipeline = Pipeline(iter([]), None, None, 3, torch.device("cpu"))

    assert pipeline.prefetch == 0


def test_nothing_is_done_before_it_is_asked_for(real_device):
    recorder = Recorder(real_device, 2)

    assert recorder.notes == []


@pytest.mark.parametrize("fail_at", range(NUM_BATCHES))
@pytest.mark.parametrize("fail_in", ["work", "submit", "fetch"])
@pytest.mark.parametrize("prefetch", PREFETCH)
def test_an_error_comes_after_the_batches_before_it(real_device, prefetch, fail_in, fail_at):
    recorder = Recorder(real_device, prefetch, fail_in=fail_in, fail_at=fail_at)

    got = [next(recorder.pipeline)[0] for _ in range(fail_at)]
    with pytest.raises(KeyError, match=f"{fail_in} {fail_at}"):
        next(recorder.pipeline)

    assert got == list(range(fail_at))
    assert next(recorder.pipeline, None) is None
    # The batch before may be fetched after it, but nothing is begun.
    assert [note for note in recorder.notes if note[0] != "fetch" or note[1] >= fail_at][-1] == (fail_in, fail_at)


@pytest.mark.parametrize("prefetch", PREFETCH)
def test_ctrl_c_is_not_put_off(real_device, prefetch):
    last = min(prefetch, NUM_BATCHES - 1)
    recorder = Recorder(real_device, prefetch, fail_in="fetch", fail_at=last, error=KeyboardInterrupt)

    with pytest.raises(KeyboardInterrupt):
        next(recorder.pipeline)

    assert next(recorder.pipeline, None) is None


@pytest.mark.parametrize("prefetch", PREFETCH)
def test_a_closed_pipeline_has_nothing_left(real_device, prefetch):
    recorder = Recorder(real_device, prefetch)
    next(recorder.pipeline)
    before = list(recorder.notes)

    recorder.pipeline.close()
    recorder.pipeline.close()

    assert next(recorder.pipeline, None) is None
    assert recorder.notes == before


@pytest.mark.parametrize("batch", [None, 3, "batch", [torch.zeros(1)], {"x": 1}, torch.zeros(2)], ids=str)
def test_a_batch_may_be_anything(batch):
    hold_for(batch, None)


SPARSE = {
    "rows": lambda device: torch.eye(3, device=device).to_sparse_csr(),
    "coordinates": lambda device: torch.eye(3, device=device).to_sparse(),
    "a part": lambda device: torch.eye(3, device=device).to_sparse().index_select(0, torch.arange(2, device=device)),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", SPARSE)
def test_parts_of_sparse_batches_are_dense(name):
    parts = parts_of(SPARSE[name]("cpu"))

    assert len(parts) > 1
    assert all(part.layout == torch.strided for part in parts)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_batches_are_held_too(name):
    hold_for(SPARSE[name]("cuda"), torch.cuda.Stream())


class Held(torch.Tensor):
    """Notes the streams that it is held for."""

    @property
    def is_cuda(self):
        return True

    def record_stream(self, stream):
        self.streams = [*getattr(self, "streams", []), stream]


def test_every_part_of_a_batch_with_types_is_held():
    batch = HeteroData()
    batch["paper"].x, batch["paper", "cites", "paper"].edge_index = Held(torch.ones(2)), Held(torch.ones(2, 1))

    hold_for(batch, "stream")

    assert batch["paper"].x.streams == batch["paper", "cites", "paper"].edge_index.streams == ["stream"]


@pytest.mark.gpu
@pytest.mark.parametrize("prefetch", [1, 3])
def test_a_slow_fetch_is_waited_for_on_the_current_stream(prefetch):
    def fetch(sample, number, positions):
        torch.cuda._sleep(5_000_000)
        return torch.full((1000,), number, device="cuda")

    work = ((number, torch.tensor([number])) for number in range(NUM_BATCHES))
    device = torch.device("cuda", torch.cuda.current_device())
    pipeline = Pipeline(work, lambda number, positions: empty_sample(positions.to(device), 1), fetch, prefetch, device)

    sums = [batch.sum().item() for _, batch in pipeline]

    assert sums == [0, 1000, 2000, 3000]


def test_what_a_batch_keeps_for_the_allocator_is_not_handed_on():
    def fetch(sample, number, item):
        batch = Data(x=sample.n_id)
        note_memory(batch, [sample.n_id])
        return batch

    work = iter([(0, torch.tensor([3]))])
    ((_, batch),) = Pipeline(work, lambda _, item: empty_sample(item, 1), fetch, 0, torch.device("cpu"))

    assert batch.x.tolist() == [3]
    assert "_memory" not in vars(batch)


def test_memory_that_batches_share_is_listed_once():
    shared, own = torch.zeros(3), torch.zeros(2)
    batches = [Data(x=shared[:1]), Data(x=shared[1:], y=own)]
    note_memory(batches[0], [shared])
    note_memory(batches[1], [shared, own])

    memory = take_memory(batches)

    assert [id(value) for value in memory] == [id(shared), id(own)]
    assert take_memory(batches) is None
    assert not any("_memory" in batch.__dict__ for batch in batches)
