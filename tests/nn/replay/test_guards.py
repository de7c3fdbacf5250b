"""For any model or loop, a replayed pass gives the result of an ordinary one, or is not replayed."""

import copy
import random
import threading
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import GCN, GraphSAGE

from pyg_direct import accelerate
from pyg_direct.errors import ArgumentError
from pyg_direct.nn.replay import batch_passes, guards, model_call, model_replay as replayed, recorded_passes
from pyg_direct.nn.replay.guards import remember_forms
from tests.nn.convolutions import assert_near
from tests.nn.replays import find_gradients, make_graph, make_loader, read_for_model, run_whole
from tests.nn.tape import TapeRecorder

WARM = 12


@pytest.fixture(autouse=True, params=["chosen", "forms"])
def _guard(request, monkeypatch):
    """Run each test with the guard of tensors that this torch has, and with the one for a torch that has none."""
    if request.param == "forms":
        monkeypatch.setattr(guards, "_guard", guards._guard_by_forms)


@pytest.fixture(autouse=True)
def _tapes(monkeypatch):
    monkeypatch.setattr(batch_passes, "_MARGIN", 0.15)
    monkeypatch.setattr(recorded_passes, "Recorder", TapeRecorder)
    read_for_model(monkeypatch)
    monkeypatch.setattr(model_call, "_can_record", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)


@pytest.fixture(scope="module")
def graph():
    return make_graph()


@pytest.fixture
def batches(graph):
    return [batch for _ in range(3) for batch in make_loader(graph, "cpu", shuffle=True)][:24]


def make_pair(graph, kind=GraphSAGE, **options):
    """Return PyG's model unchanged, the same replayed, and its handle."""
    torch.manual_seed(0)
    model = kind(graph.num_features, 32, 3, graph.num_classes, **options)
    return copy.deepcopy(model), model, replayed.watch_passes(model, is_strict=False)


def compare(models, batches, run=run_whole):
    """Gradients of both over some batches, also while passes are refused."""
    ordinary, model = models
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "passes of the model are not replayed")
        for batch in batches:
            found, expected = find_gradients(model, batch, run), find_gradients(ordinary, batch, run)
            assert len(found) == len(expected)
            assert_near(found, expected)


def go_back(model, batches):
    for batch in batches:
        run_whole(model, batch).sum().backward()


def test_tapes_replay(graph, batches):
    ordinary, model, replay = make_pair(graph)
    compare((ordinary, model), batches)
    assert replay.replayed >= WARM


def assign_state(model):
    model.load_state_dict(model.state_dict(), assign=True)


def replace_parameter(model):
    model.convs[0].lin_l.weight = torch.nn.Parameter(model.convs[0].lin_l.weight.data)


def turn_weight(model):
    model.convs[1].lin_l.weight.data = model.convs[1].lin_l.weight.data.t()


def normalize(model):
    for conv in model.convs:
        conv.normalize = True


def change_activation(model):
    model.act = torch.nn.Tanh()


def replace_layer(model):
    model.convs[1] = copy.deepcopy(model.convs[0] if model.convs[0].in_channels == 32 else model.convs[1])
    with torch.no_grad():
        model.convs[1].lin_l.bias.add_(1)


@pytest.mark.parametrize("change", [assign_state, replace_parameter, turn_weight, normalize, change_activation,
                                    replace_layer])  # fmt: skip
def test_changes_of_a_model_are_seen(graph, batches, change):
    ordinary, model, replay = make_pair(graph)
    compare((ordinary, model), batches[:WARM])
    assert replay.replayed > 0
    before = replay.ordinary
    for changed in (ordinary, model):
        change(changed)

    compare((ordinary, model), batches[WARM:16])

    assert replay.ordinary > before
    assert sum(part.grad is not None for part in model.parameters()) == len(list(model.parameters()))


class Scaled(GraphSAGE):
    """Model whose factor is a tensor, from a function, or an item of a list."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.by, self.how, self.options = torch.tensor(2.0), torch.relu, [1.0]

    def forward(self, x, edge_index):
        return self.how(super().forward(x, edge_index) * self.by * self.options[0]) + x.sum() * 0


def set_tensor(model):
    model.by = torch.tensor(3.0)


def set_function(model):
    model.how = torch.tanh


def set_item(model):
    model.options[0] = 0.1


@pytest.mark.parametrize("change", [set_tensor, set_function, set_item])
def test_attributes_of_a_model_are_seen(graph, batches, change):
    ordinary, model, replay = make_pair(graph, Scaled)
    compare((ordinary, model), batches[:WARM])
    assert replay.replayed > 0
    for changed in (ordinary, model):
        change(changed)

    compare((ordinary, model), batches[WARM:16])


class Keeps(GraphSAGE):
    def forward(self, x, edge_index):
        out = super().forward(x, edge_index)
        self.kept = out.detach()
        return out


class Appends(GraphSAGE):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = []

    def forward(self, x, edge_index):
        self.seen.append(len(x))
        return super().forward(x, edge_index)


class Throws(GraphSAGE):
    def forward(self, x, edge_index):
        return super().forward(x, edge_index) * (1 + (random.random() < 0.5))


class Writes(GraphSAGE):
    def forward(self, x, edge_index):
        return super().forward(x.mul_(0.5), edge_index)


class Mixes(GraphSAGE):
    """As a virtual node does."""

    def forward(self, x, edge_index):
        out = super().forward(x, edge_index)
        return out + out.mean(0)


class Divides(GraphSAGE):
    def forward(self, x, edge_index):
        return super().forward(x / x.norm(dim=1, keepdim=True), edge_index)


class Asks(GraphSAGE):
    def forward(self, x, edge_index):
        assert len(x) in self.counts
        return super().forward(x, edge_index)


CHANGES = "what the model holds, or is called with besides a batch, changes again and again"


@pytest.mark.parametrize(("kind", "reason"), [
    (Keeps, CHANGES),
    (Appends, CHANGES),
    (Throws, "forward draws random numbers of the host"),
    (Writes, "forward writes to its arguments"),
    (Mixes, "rows of nodes depend on nodes that are not their neighbors"),
    (Asks, "assert "),
])  # fmt: skip
def test_what_a_replayed_pass_would_not_do_is_told(graph, batches, kind, reason):
    _, model, replay = make_pair(graph, kind)
    model.counts = {len(batch.x) for batch in batches}
    before = [batch.x.clone() for batch in batches]
    with pytest.warns(RuntimeWarning, match="not replayed as CUDA graphs") as told:
        go_back(model, [*batches, *batches])

    assert len(told) == 1
    assert (replay.replayed, replay.ordinary) == (0, 2 * len(batches))
    assert replay.reason.startswith(reason)
    if kind is Appends:
        assert len(model.seen) == 2 * len(batches)
    if kind is Writes:
        # Also by a pass that is tried.
        assert_near([batch.x for batch in batches], [x * 0.25 for x in before])


class Once(GraphSAGE):
    """Model that changes an attribute that it set before only in later passes."""

    def forward(self, x, edge_index):
        out = super().forward(x, edge_index)
        self.norm = {"last": out.detach()}
        return out


def test_what_a_pass_sets_is_found_before_it_is_recorded(graph, batches):
    ordinary, model, replay = make_pair(graph, Once)

    compare((ordinary, model), [*batches, *batches])

    assert replay.replayed == 0
    assert replay.reason == CHANGES


def test_rows_that_are_divided_by_their_norm_are_numbers(graph, batches):
    ordinary, model, replay = make_pair(graph, Divides)

    compare((ordinary, model), batches)

    assert replay.replayed > 0


def test_norms_that_come_later_are_seen(graph, batches):
    ordinary, model, replay = make_pair(graph)
    for changed in (ordinary, model):
        changed.norms = torch.nn.ModuleList([torch.nn.BatchNorm1d(32) for _ in range(2)] + [torch.nn.Identity()])

    compare((ordinary, model), batches[:WARM])

    assert "a norm over all nodes, BatchNorm1d at 'norms.0'" in replay.reason


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_repeat_ordinary_passes(graph, batches, reentrant):
    ordinary, model, replay = make_pair(graph, GCN, dropout=0.5)

    def run(trained, batch):
        torch.manual_seed(len(batch.x))
        x = batch.x.clone().requires_grad_(reentrant)
        return checkpoint(lambda rows: trained(rows, batch.edge_index), x, use_reentrant=reentrant)

    compare((ordinary, model), batches[:WARM], run)

    assert replay.replayed == 0


def test_errors_of_a_recording_are_told_once_and_the_loop_goes_on(graph, batches, monkeypatch):
    ordinary, model, replay = make_pair(graph)
    tries = []

    def fail(recorder, work):
        tries.append(1)
        raise torch.OutOfMemoryError("no memory is left\nfor this")

    monkeypatch.setattr(TapeRecorder, "record", fail)
    compare((ordinary, model), batches[:WARM])

    assert (len(tries), replay.replayed, replay.reason) == (1, 0, "no memory is left")


def test_threads_take_ordinary_passes(graph, batches):
    ordinary, model, replay = make_pair(graph)
    compare((ordinary, model), batches[:WARM])
    assert replay.replayed > 0

    thread = threading.Thread(target=compare, args=((ordinary, model), batches[WARM:14]))
    thread.start()
    thread.join()
    compare((ordinary, model), batches[14:16])

    assert replay.reason == "the model is called in several threads"


def test_buffers_are_moved_by_no_trial(graph, batches):
    class Counts(GraphSAGE):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x, edge_index):
            self.count.add_(1)
            return super().forward(x, edge_index)

    _, model, replay = make_pair(graph, Counts)
    go_back(model, batches[:8])
    assert float(model.count) == 8
    go_back(model, batches[8:9])
    # A tape computes what a graph would only record.
    assert float(model.count) == 10
    go_back(model, batches[9:12])
    assert replay.replayed == 3
    assert float(model.count) == 13


def test_sizes_that_alternate_are_recorded_once(graph, batches, monkeypatch):
    ordinary, model, replay = make_pair(graph)
    made, real = [], batch_passes.PaddedPasses.record
    monkeypatch.setattr(batch_passes.PaddedPasses, "record", lambda *args: (made.append(1), real(*args))[1])

    def run(trained, batch):
        return trained(batch.x, batch.edge_index, batch_size=batch.batch_size)

    compare((ordinary, model), [*batches, *batches], run)

    sizes = {batch.batch_size for batch in batches}
    assert len(sizes) > 1
    assert len(made) <= 2
    assert replay.replayed > WARM


@pytest.mark.parametrize("is_graded", [False, True])
def test_changed_forms_of_tensors_are_seen(is_graded):
    part, other = torch.nn.Parameter(torch.ones(3, 3)), torch.ones(2)
    with torch.set_grad_enabled(is_graded):
        has_forms = remember_forms([part, other])
        assert has_forms(part, other)
        assert not has_forms(part, torch.nn.Parameter(other))
        for data in (part.data.t().contiguous().t(), part.data.half(), part.data[:2]):
            kept, part.data = part.data, data
            assert not has_forms(part, other)
            part.data = kept
        part.requires_grad_(False)
        assert not has_forms(part, other)
        part.requires_grad_()
        assert has_forms(part, other)
    assert remember_forms([])()


@pytest.mark.parametrize("is_graded", [False, True])
def test_weights_that_are_frozen_after_a_pass_are_seen(is_graded):
    model, device = GraphSAGE(8, 8, 2), torch.device("cpu")
    state = guards.State(guards.Outside(model))
    with torch.set_grad_enabled(is_graded):
        before = state.read(model, device)
    with torch.set_grad_enabled(not is_graded):
        assert state.read(model, device) is before

    model.convs[0].requires_grad_(False)

    with torch.set_grad_enabled(not is_graded):
        after = state.read(model, device)
    assert after != before
    with torch.set_grad_enabled(is_graded):
        assert state.read(model, device) is after


class OtherNames:
    """Guard of a torch that names the arguments in another way."""

    def __init__(self, *tensors, dynamic_sizes, dynamic_strides):
        pass


class NeedsGradients:
    """Guard that knows the need of gradients only while they are enabled, as of early versions of torch."""

    def __init__(self, *tensors, dynamic_dims_sizes, dynamic_dims_strides):
        self.forms = self.read(tensors)

    def read(self, tensors):
        return [(type(part), part.dtype, part.shape, part.stride(), torch.is_grad_enabled() and part.requires_grad)
                for part in tensors]  # fmt: skip

    def check(self, *tensors):
        return self.read(tensors) == self.forms


class NoStrides(NeedsGradients):
    def read(self, tensors):
        return [(type(part), part.dtype, part.shape, part.requires_grad) for part in tensors]


class Whole(NeedsGradients):
    def read(self, tensors):
        return [(type(part), part.dtype, part.shape, part.stride(), part.requires_grad) for part in tensors]


@pytest.mark.parametrize(("kind", "is_taken"), [(None, False), (OtherNames, False), (NeedsGradients, False),
                                                (NoStrides, False), (Whole, True)])  # fmt: skip
def test_a_guard_of_torch_is_taken_if_it_sees_all_changes(monkeypatch, kind, is_taken):
    name = "torch._C._dynamo.guards.TensorGuards"
    if kind is None:
        monkeypatch.delattr(name)
    else:
        monkeypatch.setattr(name, kind)

    assert guards._choose_guard() is (guards._guard_by_torch if is_taken else guards._guard_by_forms)


def test_guards_see_all_changes():
    assert guards._sees_changes(guards._choose_guard())
    assert guards._sees_changes(guards._guard_by_forms)


def test_arguments_that_pyg_takes_are_taken(graph, batches):
    class Lists(GraphSAGE):
        def forward(self, x, edge_index, parts):
            return super().forward(x, edge_index) + sum(parts).sum()

    ordinary, model, replay = make_pair(graph, Lists)
    model.register_buffer("sparse", torch.eye(3).to_sparse())

    def run(trained, batch):
        return trained(batch.x, batch.edge_index, [torch.ones(2)] * 4)

    compare((ordinary, model), batches[:WARM], run)
    assert (replay.replayed, replay.reason) == (0, None)


def test_distributed_data_parallel_holds_a_replayed_model(graph, batches, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        ordinary, model, replay = make_pair(graph)
        held = torch.nn.parallel.DistributedDataParallel(model)
        with pytest.raises(ArgumentError, match="the one that DistributedDataParallel holds"):
            accelerate(held, replay=True)
        compare((ordinary, held), batches[:16])
        assert replay.replayed > 0
    finally:
        dist.destroy_process_group()
