"""Steps replayed as a CUDA graph: the losses of ordinary steps, whatever the size of a batch."""

import copy
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.nn.functional as F

from pyg_direct import GraphedStep, NeighborLoader, NodeEmbedding, SparseSGD, accelerate
from pyg_direct.datasets import synthetic_graph
from pyg_direct.errors import ArgumentError
from pyg_direct.nn.replay.padded_batch import EDGES, NODES, PaddedBatch, Sizes, read_sizes
from pyg_direct.runtime.cuda import graph_capture as recordings
from pyg_direct.runtime.cuda.device import abilities
from tests.nn.convolutions import assert_near
from tests.nn.replays import MODELS, make_model, record_anywhere
from tests.products import read_target


@pytest.fixture(scope="module")
def graph():
    return synthetic_graph("products", scale=0.001, device="cpu")


def make_loader(graph, device, fanouts=(5, 4, 3), batch_size=32, **options):
    return NeighborLoader(graph.to_data(), list(fanouts), graph.train_idx, batch_size=batch_size, seed=0, device=device,
                          **options)  # fmt: skip


def make_compute(model):
    def compute(batch):
        out = model(batch.x, batch.edge_index, num_sampled_nodes_per_hop=batch.num_sampled_nodes,
                    num_sampled_edges_per_hop=batch.num_sampled_edges)  # fmt: skip
        return F.cross_entropy(out[: batch.batch_size], batch.y[: batch.batch_size].long())

    return compute


def find_gradients(model, batch):
    loss = make_compute(model)(batch)
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.filterwarnings("ignore:The usage of `scatter:UserWarning")
@pytest.mark.parametrize("is_accelerated", [False, True], ids=["plain", "accelerated"])
@pytest.mark.parametrize("name", MODELS)
def test_padded_batches_give_the_loss_and_gradients_of_batches(real_device, graph, name, is_accelerated):
    model = make_model(graph, real_device, name)
    if is_accelerated:
        accelerate(model)
    batches = list(make_loader(graph, real_device, drop_last=True))[:4]
    largest = read_sizes(batches[0])
    for batch in batches:
        largest = largest.join(read_sizes(batch))
    padded = PaddedBatch(batches[0], largest, 0.05, ["x", "y"])
    memory = padded.data.x.data_ptr(), padded.data.edge_index.data_ptr()

    for batch in batches:
        assert padded.fill(batch)
        assert_near(find_gradients(model, padded.data), find_gradients(model, batch))

    assert (padded.data.x.data_ptr(), padded.data.edge_index.data_ptr()) == memory


def test_batches_that_find_no_room_are_told(graph):
    first, *_, last = make_loader(graph, "cpu")
    sizes = read_sizes(first)
    padded = PaddedBatch(first, sizes, 0.05, ["x", "y"])

    assert padded.fill(first)
    assert not padded.fill(last)
    assert not padded.fill(next(iter(make_loader(graph, "cpu", (9, 4, 3)))))
    first.x = first.x.double()
    assert not padded.fill(first)


def test_attributes_of_nodes_and_edges_move_to_their_places(real_device, graph):
    batch = next(iter(make_loader(graph, real_device)))
    batch.edge_attr = torch.arange(batch.num_edges, device=real_device)
    batch.y = torch.arange(batch.num_nodes, device=real_device)
    padded = PaddedBatch(batch, read_sizes(batch), 0.1, ["y", "edge_attr"])

    assert padded.fill(batch)

    row, target = padded.data.edge_index[:, padded.data.edge_attr > 0]
    expected = batch.edge_index[:, batch.edge_attr > 0]
    assert torch.equal(torch.stack([padded.data.y[row], padded.data.y[target]]), expected)
    with pytest.raises(ArgumentError, match="a row for each node or edge, got 'batch_size'"):
        PaddedBatch(batch, read_sizes(batch), 0.1, ["batch_size"])


def test_places_hold_what_smaller_batches_leave_over():
    sizes = Sizes({NODES: (10, 30, 50)}, {EDGES: (40, 100)})

    places = sizes.widen(0.1, {EDGES: 5}, 10)

    assert places == Sizes({NODES: (10 + 5, 30 + 9, 55)}, {EDGES: (44, 110)})


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["adam", "capturable"])
# PyG's own GCNConv and GATConv wait for the GPU.
@pytest.mark.parametrize(
    ("name", "is_accelerated"), [(name, True) for name in MODELS] + [("sage", False), ("gin", False)]
)
def test_losses_are_those_of_ordinary_steps(graph, name, optimizer, is_accelerated):
    ordinary = make_model(graph, "cuda", name)
    graphed = copy.deepcopy(ordinary)
    losses = []
    for model in (ordinary, graphed):
        if is_accelerated:
            accelerate(model)
        lr = torch.tensor(0.01, device="cuda") if optimizer == "capturable" else 0.01
        adam = torch.optim.Adam(model.parameters(), lr=lr, capturable=optimizer == "capturable")
        warm_up = 3 if model is graphed else 1000
        step = GraphedStep(model, make_compute(model), adam, warm_up=warm_up, margin=0.05)
        losses.append([float(step(batch)) for _ in range(3) for batch in make_loader(graph, "cuda", shuffle=True)][:20])

    assert step.reason is None
    assert step.replayed > 8
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-2, atol=1e-3)
    assert min(losses[1]) < losses[1][0]


@pytest.mark.gpu
def test_more_room_is_made_for_larger_batches(graph):
    model = make_model(graph, "cuda")
    step = GraphedStep(model, make_compute(model), torch.optim.SGD(model.parameters(), lr=0.0), warm_up=2, margin=0.05)
    small, large = (list(make_loader(graph, "cuda", fanouts, drop_last=True)) for fanouts in ((2, 2), (9, 9)))
    for batch in small[:4]:
        step(batch)
    before = step.replayed

    for batch in large[:8]:
        step(batch)

    assert before > 0
    assert step.replayed > before
    assert step.ordinary < 3 + 6


@pytest.mark.gpu
def test_steps_that_wait_for_the_gpu_stay_ordinary(graph):
    model = make_model(graph, "cuda")
    compute = make_compute(model)

    def read_back(batch):
        loss = compute(batch)
        assert float(loss.detach()) > 0
        return loss

    step = GraphedStep(model, read_back, torch.optim.SGD(model.parameters()), warm_up=1)
    batches = list(make_loader(graph, "cuda", drop_last=True))[:4]

    with pytest.warns(RuntimeWarning, match="steps are not replayed as a CUDA graph"):
        losses = [float(step(batch)) for batch in batches]

    assert (step.replayed, step.ordinary, len(losses)) == (0, 4, 4)
    assert step.reason is not None


@pytest.fixture
def recording(monkeypatch):
    """Record steps on a CPU, where they run; list the requested streams, contexts and clearings."""
    calls = []

    @contextmanager
    def enter(name, stream):
        calls.append((name, stream))
        yield

    for name in ("get_sync_debug_mode", "set_sync_debug_mode", "synchronize", "CUDAGraph",
                 "graph_pool_handle"):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"new of {device}")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"current of {device}")
    monkeypatch.setattr(recordings, "record_graph", lambda graph, stream, pool: enter("graph", stream))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: enter("stream", stream))
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: calls.append("clear"))
    return calls


def record(step, graph):
    batch = next(iter(make_loader(graph, "cpu")))
    step._largest = read_sizes(batch)
    step._record(batch)
    return step


@pytest.mark.usefixtures("recording")
def test_steps_with_sparse_gradients_stay_ordinary(graph):
    model = torch.nn.Sequential(NodeEmbedding(graph.num_nodes, graph.num_classes, device="cpu"))

    def compute(batch):
        return F.cross_entropy(model(batch.n_id[: batch.batch_size]), batch.y[: batch.batch_size])

    step = GraphedStep(model, compute, SparseSGD(model.parameters()), names=["x", "y", "n_id"])
    with pytest.warns(RuntimeWarning, match="gradients are sparse"):
        record(step, graph)

    assert step.reason == "gradients are sparse"


@pytest.mark.usefixtures("recording")
def test_steps_with_parameters_of_others_stay_ordinary(graph):
    model, users = make_model(graph, "cpu"), NodeEmbedding(graph.num_nodes, 1, device="cpu")
    compute = make_compute(model)

    def run(batch):
        return compute(batch) + users(batch.n_id).mean()

    step = GraphedStep(model, run, torch.optim.SGD(model.parameters()), names=["x", "y", "n_id"])
    with pytest.warns(RuntimeWarning, match="reads parameters that neither model nor optimizer has"):
        record(step, graph)

    # The trial leaves no gradient there.
    assert users.weight.grad is None


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("waits", [False, True])
def test_waits_are_looked_for_before_a_step_is_recorded(graph, waits, monkeypatch):
    model, modes = make_model(graph, "cpu"), []
    compute = make_compute(model)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def run(batch):
        if waits:
            raise RuntimeError("called a synchronizing CUDA operation\nand more")
        return compute(batch)

    step = GraphedStep(model, run, torch.optim.SGD(model.parameters()))
    with pytest.warns(RuntimeWarning, match="called a synchronizing") if waits else nullcontext():
        record(step, graph)

    assert step.reason == ("called a synchronizing CUDA operation" if waits else None)
    assert modes == ["error", 1]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_step_is_recorded_on_a_stream_of_the_gpu_of_its_batches(graph, recording):
    model = make_model(graph, "cpu")

    record(GraphedStep(model, make_compute(model), torch.optim.SGD(model.parameters())), graph)

    assert recording == ["clear", ("stream", "current of cpu"), ("graph", "new of cpu"), "clear"]


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize(("spared", "left"), [(None, 8), (0, 0), (3, 3)])
def test_recorded_products_leave_what_is_asked_for_or_what_features_take(graph, monkeypatch, spared, left):
    leaving = []

    @contextmanager
    def leave(count, device):
        leaving.append((count, device))
        yield

    monkeypatch.setattr(recordings, "count_spared", lambda index: 8)
    monkeypatch.setattr(recordings, "products_leave", leave)
    model = make_model(graph, "cpu")

    record(GraphedStep(model, make_compute(model), torch.optim.SGD(model.parameters()), spared=spared), graph)

    assert leaving == [(left, torch.device("cpu"))]


@pytest.mark.gpu
def test_products_leave_multiprocessors_only_while_a_step_is_recorded(graph):
    model, targets = make_model(graph, "cuda"), []
    compute = make_compute(model)

    def note(batch):
        targets.append(read_target())
        return compute(batch)

    step = GraphedStep(model, note, torch.optim.SGD(model.parameters(), lr=0.1), warm_up=2, margin=0.1, spared=6)
    for batch in make_loader(graph, "cuda", drop_last=True):
        step(batch)

    assert step.replayed > 0
    assert set(targets) == {0, abilities(0).multiprocessors - 6}
    assert read_target() == 0


@pytest.mark.usefixtures("recording")
def test_gradients_of_parameters_without_an_optimizer_are_of_the_graph_too(graph):
    model = make_model(graph, "cpu")
    first, *others = model.parameters()
    mine = first.grad = torch.ones_like(first)

    step = record(GraphedStep(model, make_compute(model), torch.optim.SGD(others, lr=0.1)), graph)

    gradients = {id(parameter): gradient for parameter, gradient in step._recorded.gradients}
    assert gradients.keys() == {id(parameter) for parameter in model.parameters()}
    assert gradients[id(first)] is not mine
    assert torch.equal(mine, torch.ones_like(first))
    assert first.grad is None


def test_an_optimizer_of_another_model_is_refused(graph):
    model, other = make_model(graph, "cpu"), make_model(graph, "cpu")
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)

    with pytest.raises(ArgumentError, match=r"optimizer must hold parameters of model, got SGD of .* others: make it"):
        GraphedStep(model, make_compute(model), optimizer)

    # One of which nothing learns asks for nothing.
    GraphedStep(model.requires_grad_(False), make_compute(model), optimizer)


def test_an_optimizer_with_a_learning_rate_of_the_host_steps_outside(graph):
    model = make_model(graph, "cpu")
    adam = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01), capturable=True)

    assert not GraphedStep(model, make_compute(model), adam)._steps_inside()


@pytest.mark.gpu
@pytest.mark.gpus
def test_steps_are_replayed_on_a_gpu_that_is_not_the_current_one(graph):
    losses = []
    for warm_up in (1000, 2):
        model = make_model(graph, "cuda:1")
        step = GraphedStep(model, make_compute(model), torch.optim.SGD(model.parameters(), lr=0.1), warm_up=warm_up,
                           margin=0.1)  # fmt: skip
        losses.append([float(step(batch)) for batch in make_loader(graph, "cuda:1", drop_last=True)])

    assert step.replayed > 0
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-2, atol=1e-3)


def test_steps_on_a_cpu_are_ordinary(graph):
    model = make_model(graph, "cpu")
    step = GraphedStep(model, make_compute(model), torch.optim.Adam(model.parameters(), lr=0.01), warm_up=1)

    losses = [float(step(batch)) for batch in list(make_loader(graph, "cpu"))[:4]]

    assert (step.replayed, step.ordinary, step.reason) == (0, 4, None)
    assert losses[-1] < losses[0]


def test_a_replayed_model_is_left_alone_in_a_step(graph, monkeypatch):
    record_anywhere(torch.device("cpu"), monkeypatch)
    model = make_model(graph, "cpu")
    replay = accelerate(model, replay="auto").replay
    step = GraphedStep(model, make_compute(model), torch.optim.SGD(model.parameters(), 0.1))

    for batch in list(make_loader(graph, "cpu", drop_last=True))[:3]:
        step(batch)

    assert (replay.replayed, replay.ordinary, replay._passes) == (0, 3, {})


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:steps are not replayed")
def test_norms_over_sampled_nodes_keep_steps_ordinary(graph):
    model = make_model(graph, "cuda", norm="batch_norm")
    step = GraphedStep(model, make_compute(model), torch.optim.SGD(model.parameters(), lr=0.01), warm_up=2)

    for batch in list(make_loader(graph, "cuda"))[:5]:
        step(batch)

    assert step.replayed == 0
    assert "BatchNorm at 'norms.0'" in step.reason


def test_arguments_are_checked(graph):
    model = make_model(graph, "cpu", norm="graph_norm")
    optimizer = torch.optim.SGD(model.parameters())

    with pytest.raises(ArgumentError, match=r"no norm over all nodes, got GraphNorm at 'norms\.0"):
        GraphedStep(model, make_compute(model), optimizer)
    other = make_model(graph, "cpu", norm="layer_norm")
    with pytest.raises(ArgumentError, match="no norm over all nodes, got LayerNorm"):
        GraphedStep(other, make_compute(other), torch.optim.SGD(other.parameters()))
    inner = torch.nn.Sequential(torch.nn.LayerNorm(3), torch.nn.InstanceNorm1d(3))
    with pytest.raises(ArgumentError, match="no norm over all nodes, got InstanceNorm1d at '1'"):
        GraphedStep(inner, make_compute(model), torch.optim.SGD(inner.parameters()))
    plain = make_model(graph, "cpu", norm="layer_norm", norm_kwargs={"mode": "node"})
    optimizer = torch.optim.SGD(plain.parameters())
    with pytest.raises(ArgumentError, match="warm_up must be at least 1, got 0"):
        GraphedStep(plain, make_compute(plain), optimizer, warm_up=0)
    with pytest.raises(ArgumentError, match=r"margin must lie in \[0, 1\], got 2"):
        GraphedStep(plain, make_compute(plain), optimizer, margin=2)
    with pytest.raises(ArgumentError, match="spared must be at least 0 or None, got -1"):
        GraphedStep(plain, make_compute(plain), optimizer, spared=-1)
