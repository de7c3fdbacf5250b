"""Models that read numbers of the device on the host in forward: replayed as long as these stay as recorded."""

import copy

import pytest
import torch
from torch_geometric.nn import GraphSAGE

from pyg_direct import accelerate
from tests.nn.convolutions import assert_near
from tests.nn.replays import find_gradients, make_graph, make_loader, record, record_anywhere

OPTIONS = {"dropout": 0.5}


@pytest.fixture
def device(real_device, monkeypatch):
    record_anywhere(real_device, monkeypatch)
    return real_device


@pytest.fixture(scope="module")
def graph():
    return make_graph()


@pytest.fixture
def batches(graph, device):
    loader = make_loader(graph, device, drop_last=True)
    return [batch for _ in range(3) for batch in loader]


def make_pair(kind, graph, device, replay="auto"):
    torch.manual_seed(0)
    ordinary = kind(graph.num_features, 32, 3, graph.num_classes).to(device)
    model = copy.deepcopy(ordinary)
    accelerate(ordinary, replay=False)
    return ordinary, model, accelerate(model, replay=replay).replay


def run_both(ordinary, model, batches):
    for batch in batches:
        assert_near(find_gradients(model, batch), find_gradients(ordinary, batch))


class Asserts(GraphSAGE):
    def forward(self, x, *args, **kwargs):
        assert (x < 1e6).all()
        if not (x.isnan().any() or not x.isfinite().all()):
            x = x + 1
        return super().forward(x, *args, **kwargs)


class Counts(GraphSAGE):
    def forward(self, x, *args, **kwargs):
        if (x > 1e6).count_nonzero() == 0 and not int((x > 1e6).sum()) and not (x > 1e6).sum() > 0:
            x = x * 2
        return super().forward(x, *args, **kwargs)


class Fills(GraphSAGE):
    """Rows under a mask get a value of the device; their number is never the same."""

    def forward(self, x, *args, **kwargs):
        x = x.clone()
        x[x[:, 0] > 0] = x.new_ones(x.shape[1])
        return super().forward(x, *args, **kwargs)


class FillsLearned(GraphSAGE):
    """The same of rows that have a gradient."""

    def forward(self, x, *args, **kwargs):
        x = x * self.convs[0].lin_l.weight[0, 0]
        x[x[:, 0] > 0] = torch.ones(x.shape[1], device=x.device)
        return super().forward(x, *args, **kwargs)


@pytest.mark.parametrize("replay", [True, "auto"])
@pytest.mark.parametrize("kind", [Asserts, Counts, Fills, FillsLearned])
def test_reads_with_the_same_answers_are_replayed(graph, device, batches, kind, replay):
    ordinary, model, found = make_pair(kind, graph, device, replay)

    run_both(ordinary, model, batches)

    assert found.reason is None
    assert found.replayed >= 8


def spoil(batch, value):
    batch = copy.copy(batch)
    batch.x = batch.x.clone()
    batch.x[-1, 0] = value
    return batch


@pytest.mark.parametrize(("kind", "value"), [(Asserts, -torch.inf), (Counts, 2e6)])
def test_another_answer_is_noticed_before_its_results_are_used(graph, device, batches, kind, value):
    ordinary, model, replay = make_pair(kind, graph, device)
    run_both(ordinary, model, batches[:12])
    before = replay.replayed

    for batch in batches[12:16]:
        # A result of the other branch would be another one.
        found, expected = (find_gradients(one, spoil(batch, value)) for one in (model, ordinary))
        torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-5, atol=1e-6)
    assert replay.replayed == before > 0

    run_both(ordinary, model, batches[16:20])
    # Rows that are left over hold what was given before, until others take their places.
    assert replay.replayed > before


def test_a_failing_assertion_fails_as_in_an_ordinary_pass(graph, device, batches):
    _, model, replay = make_pair(Asserts, graph, device)
    record(model, batches)
    before = replay.replayed

    with pytest.raises(AssertionError):
        find_gradients(model, spoil(batches[-1], 2e6))

    assert replay.replayed == before


class Draws(Asserts):
    """Dropout and a count of calls, after which another answer leaves the same draws and buffers."""

    def __init__(self, *args):
        super().__init__(*args, dropout=0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, *args, **kwargs):
        self.calls += 1
        return super().forward(*args, **kwargs)


def test_another_answer_leaves_draws_and_buffers(graph, device, batches):
    ordinary, model, replay = make_pair(Draws, graph, device)
    record(model, batches)
    model.calls.zero_()
    ordinary.load_state_dict(model.state_dict())
    before = replay.replayed

    found = []
    for trained in (model, ordinary):
        torch.manual_seed(5)
        found.append(find_gradients(trained, spoil(batches[-1], -torch.inf)))

    assert replay.replayed == before
    assert model.calls == ordinary.calls == 1
    torch.testing.assert_close(*found, equal_nan=True)


class Changes(GraphSAGE):
    """Each pass would read another answer than the one before."""

    def forward(self, x, *args, **kwargs):
        x = x if (x < 1e6).all() else -x
        return super().forward(x, *args, **kwargs)


def test_answers_that_change_again_and_again_are_told(graph, device, batches, monkeypatch):
    monkeypatch.setattr("pyg_direct.nn.replay.model_replay._MOST_DROPPED", 1)
    ordinary, model, replay = make_pair(Changes, graph, device, True)
    record(model, batches)
    before = replay.replayed

    with pytest.warns(RuntimeWarning, match="numbers that forward reads on the host change again and again"):
        run_both(ordinary, model, [spoil(batch, 2e6) for batch in batches[:9]])

    run_both(ordinary, model, batches[:2])
    assert replay.replayed == before


class AnyOfAll(GraphSAGE):
    """True of all rows may be true of padding alone."""

    def forward(self, x, *args, **kwargs):
        return super().forward(x if (x < 1e6).any() else -x, *args, **kwargs)


class SumOfAll(GraphSAGE):
    def forward(self, x, *args, **kwargs):
        return super().forward(x if x.sum() < 1e9 else -x, *args, **kwargs)


class MeanOfAll(GraphSAGE):
    def forward(self, x, *args, **kwargs):
        return super().forward(x if (x.mean(0) < 1e9).all() else -x, *args, **kwargs)


@pytest.mark.parametrize("kind", [AnyOfAll, SumOfAll, MeanOfAll])
def test_reads_that_padding_may_change_are_told(graph, device, batches, kind):
    ordinary, model, replay = make_pair(kind, graph, device, True)

    with pytest.warns(RuntimeWarning, match="reads a number on the host that padding may change"):
        run_both(ordinary, model, batches[:10])

    assert replay.replayed == 0


def test_whole_graphs_read_any_number(graph, device):
    class Scales(GraphSAGE):
        def forward(self, x, edge_index):
            return super().forward(x / float(x.abs().max()), edge_index)

    data = graph.to_data()
    x, edge_index = data.x[:200].to(device), torch.randint(200, (2, 900)).to(device)
    ordinary, model, replay = make_pair(Scales, graph, device)
    for number in range(30):
        if number == 20:
            x.mul_(2)
            x[3, 3] = 7
        found = []
        for trained in (model, ordinary):
            trained.zero_grad()
            out = trained(x, edge_index)
            out.square().sum().backward()
            found.append([out.detach(), *(part.grad for part in trained.parameters())])
        assert_near(*found)
        if number == 19:
            assert replay.reason is None
            assert replay.replayed > 0
            before = replay.replayed
    # The answer is another one from then on.
    assert replay.replayed == before
