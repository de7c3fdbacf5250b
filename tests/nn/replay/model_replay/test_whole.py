"""Whole graphs whose passes are replayed: steps and evaluations of an unedited loop, as in ordinary passes.

Without a GPU, recordings are calls that are made again over the same memory.
"""

import re
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import APPNP, GAT, GCN, GCNConv

from pyg_direct import accelerate
from pyg_direct.nn.replay import recorded_passes
from pyg_direct.nn.replay.model_replay import SearchingPaths
from tests.nn.replays import pair_with_ordinary
from tests.nn.whole_programs import (
    CLASSES,
    NODES,
    Graph,
    Program,
    Sage,
    assert_learns_alike,
    evaluate,
    find_loss,
    learn,
    make_adam,
    train,
)


@pytest.fixture
def graph(device):
    return Graph(device)


MODELS = {
    "gcn": lambda: GCN(32, 16, 2, CLASSES, dropout=0.5),
    # Dropout of attention draws numbers in another order, as in any accelerated layer.
    "gat": lambda: GAT(32, 16, 2, CLASSES, heads=4),
    "norm": Program,
    "sage": lambda: Program(kind=Sage),
}


@pytest.mark.parametrize("name", MODELS)
def test_steps_and_evaluations_are_those_of_ordinary_passes(device, graph, name):
    torch.manual_seed(0)
    ordinary, model, replay = pair_with_ordinary(MODELS[name](), device)

    # Draws too, so also statistics of norms and every later loss.
    assert_learns_alike(ordinary, model, graph)

    assert replay.reason is None
    assert replay.replayed >= 14
    assert replay.replayed + replay.ordinary == 32


def test_backward_runs_in_the_calling_thread_until_the_end_of_replay(device, graph):
    model, threads = Program().to(device), []
    accelerated = accelerate(model.double(), replay="auto")
    model.conv2.bias.register_hook(lambda grad: threads.append(threading.get_ident()))
    torch.autograd.set_multithreading_enabled(True)

    learn(model, graph)

    assert accelerated.replay.replayed > 0
    assert threads[-1] == threading.get_ident()
    assert not torch._C._is_multithreading_enabled()
    accelerated.undo()
    assert torch._C._is_multithreading_enabled()


def test_dropout_differs_in_every_pass(device, graph):
    _, model, replay = pair_with_ordinary(Program(), device)
    learn(model, graph)
    before = replay.replayed
    model.train()

    found = [model(graph.x, graph.edge_index).detach() for _ in range(3)]

    assert replay.replayed == before + 3
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])
    share = float((found[0] == 0).float().mean())
    assert share < 0.2


def _schedule(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.plan = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    return optimizer


def step_by_schedule(model, graph, optimizer):
    loss = train(model, graph, optimizer)
    optimizer.plan.step()
    return loss


def step_with_clipping(model, graph, optimizer):
    model.train()
    optimizer.zero_grad(set_to_none=False)
    loss = find_loss(model, graph)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss.item()


def step_of_halves(model, graph, optimizers):
    model.train()
    loss = find_loss(model, graph)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def _two(model):
    return [torch.optim.Adam(model.conv1.parameters(), 0.01), torch.optim.SGD(model.conv2.parameters(), 0.1)]


def step_with_penalty(model, graph, optimizer):
    """Gradients of gradients."""
    model.train()
    optimizer.zero_grad()
    loss = find_loss(model, graph)
    parts = torch.autograd.grad(loss, list(model.conv2.parameters()), create_graph=True)
    (loss + 0.1 * sum(part.square().sum() for part in parts)).backward()
    optimizer.step()
    return loss.item()


def step_backward_twice(model, graph, optimizer):
    model.train()
    optimizer.zero_grad()
    loss = find_loss(model, graph)
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    return loss.item()


def step_of_two_passes(model, graph, optimizer):
    model.train()
    optimizer.zero_grad()
    first, second = (model(graph.x, graph.edge_index) for _ in range(2))
    loss = F.cross_entropy(first, graph.y) + F.mse_loss(first, second)
    loss.backward()
    optimizer.step()
    return loss.item()


def step_of_learned_rows(model, graph, optimizer):
    """Rows that are made for each pass, and have a gradient."""
    model.train()
    optimizer.zero_grad()
    scale = torch.ones(32, device=graph.x.device, dtype=torch.float64, requires_grad=True)
    loss = F.cross_entropy(model(graph.x * scale, graph.edge_index), graph.y)
    loss.backward()
    optimizer.step()
    return float(loss.detach() + scale.grad.sum())


def step_that_writes(model, graph, optimizer):
    """The same rows with other numbers."""
    with torch.no_grad():
        graph.x.copy_(graph.x.roll(1, 0))
    return train(model, graph, optimizer)


STEPS = {
    "schedule": (step_by_schedule, _schedule),
    "clipping": (step_with_clipping, make_adam),
    "several optimizers": (step_of_halves, _two),
    "gradients of gradients": (step_with_penalty, make_adam),
    "backward twice": (step_backward_twice, make_adam),
    "two passes": (step_of_two_passes, make_adam),
    "learned rows": (step_of_learned_rows, make_adam),
    "written rows": (step_that_writes, make_adam),
}


@pytest.mark.parametrize("name", STEPS)
def test_loops_train_as_before(device, name):
    step, make_optimizer = STEPS[name]
    torch.manual_seed(0)
    ordinary, model, replay = pair_with_ordinary(Program(), device)
    expected = learn(ordinary, Graph(device), 20, make_optimizer, step)

    found = learn(model, Graph(device), 20, make_optimizer, step)

    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found[1][-1], expected[1][-1], rtol=1e-6, atol=1e-8)
    assert replay.reason is None
    assert replay._passes[True, True][0].recording is not None


def test_autocast_with_a_scaler(device, graph):
    torch.manual_seed(0)
    ordinary, model, replay = pair_with_ordinary(Program(0.0), device)
    found, x = [], graph.x.float()
    for trained in (ordinary.float(), model.float()):
        optimizer, scaler = make_adam(trained), torch.amp.GradScaler(device.type, init_scale=1024.0)
        losses = []
        for _ in range(16):
            trained.train()
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=torch.bfloat16):
                out = trained(x, graph.edge_index)
                loss = F.cross_entropy(out[graph.mask], graph.y[graph.mask])
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        found.append((torch.tensor(losses), out.dtype))

    assert replay.replayed >= 7
    assert found[0][1] == found[1][1]
    torch.testing.assert_close(found[0][0], found[1][0], rtol=5e-2, atol=5e-2)


def test_results_are_kept_across_passes(device, graph):
    _, model, replay = pair_with_ordinary(Program(), device)
    learn(model, graph)
    before = replay.replayed
    first = evaluate(model, graph)
    kept = first.clone()
    for part in model.parameters():
        part.data.mul_(2)

    second = evaluate(model, graph)

    assert replay.replayed == before + 2
    assert torch.equal(first, kept)
    assert not torch.equal(first, second)


def change_nothing(model):
    pass


def freeze(model):
    model.conv1.requires_grad_(False)


def replace_data(model):
    for part in model.parameters():
        part.data = part.data * 0.5


def replace_parameter(model):
    model.conv2.bias = torch.nn.Parameter(model.conv2.bias.detach() + 1)


def load(model):
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def drop_less(model):
    model.dropout = 0.1


def put_a_hook(model):
    model.conv2.register_forward_hook(lambda module, args, out: out * 2)


def evaluate_a_part(model):
    model.norm.eval()


def replace_forward(model):
    plain = model.conv2.forward
    model.conv2.forward = lambda *args: 2 * plain(*args)


CHANGES = [
    replace_forward,
    change_nothing,
    freeze,
    replace_data,
    replace_parameter,
    load,
    drop_less,
    put_a_hook,
    evaluate_a_part,
]


@pytest.mark.parametrize("change", CHANGES)
def test_changes_in_the_middle_are_seen(device, graph, change):
    torch.manual_seed(0)
    ordinary, model, replay = pair_with_ordinary(Program(), device)
    for trained in (ordinary, model):
        learn(trained, graph, 12)
        change(trained)
    assert replay.replayed > 0

    assert_learns_alike(ordinary, model, graph)


def test_copies_that_follow_slowly(device, graph):
    torch.manual_seed(0)
    ordinary, model, _ = pair_with_ordinary(Program(), device)
    found = []
    for trained in (ordinary, model):
        follower = torch.optim.swa_utils.AveragedModel(trained, avg_fn=lambda old, new, _: 0.9 * old + 0.1 * new)
        optimizer, results = make_adam(trained), []
        torch.manual_seed(1)
        for _ in range(14):
            train(trained, graph, optimizer)
            follower.update_parameters(trained)
            results.append(evaluate(follower, graph))
        found.append(results)

    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)
    assert found[1][0].shape == (NODES, CLASSES)


def test_edges_that_are_written_are_sorted_anew(device, graph):
    torch.manual_seed(0)
    ordinary, model, replay = pair_with_ordinary(Program(0.0), device)
    learn(model, graph, 12)
    learn(ordinary, graph, 12)
    assert replay.replayed > 0
    graph.edge_index.copy_(Graph(device, seed=1).edge_index)

    torch.testing.assert_close(evaluate(model, graph), evaluate(ordinary, graph), rtol=1e-6, atol=1e-8)
    assert_learns_alike(ordinary, model, graph)


def test_other_graphs_in_between(device, graph):
    torch.manual_seed(0)
    ordinary, model, replay = pair_with_ordinary(Program(), device)
    learn(model, graph, 12)
    learn(ordinary, graph, 12)
    other = Graph(device, seed=1)
    other.x, other.edge_index = other.x[:50], other.edge_index[:, (other.edge_index < 50).all(0)]
    other.y, other.mask = other.y[:50], other.mask[:50]

    assert_learns_alike(ordinary, model, other, epochs=4)
    assert_learns_alike(ordinary, model, graph, epochs=4)
    assert replay.reason is None


HIDDEN = {"scale": 1.0}
TABLE = []


class ReadsGlobals(Program):
    def forward(self, x, edge_index):
        return super().forward(x, edge_index) * HIDDEN["scale"]


def test_numbers_outside_of_the_model_are_seen(device, graph):
    ordinary, model, replay = pair_with_ordinary(ReadsGlobals(0.0), device)
    learn(model, graph, 12)
    learn(ordinary, graph, 12)
    assert replay.replayed > 0
    HIDDEN["scale"] = 2.0
    try:
        torch.testing.assert_close(evaluate(model, graph), evaluate(ordinary, graph), rtol=1e-6, atol=1e-8)
    finally:
        HIDDEN["scale"] = 1.0


class Options:
    def __init__(self, **options):
        self.__dict__.update(options)


class Slotted:
    __slots__ = ("scale",)


class AnyName:
    def __init__(self):
        self.held = {"scale": 1.0}

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self.held[name]


class ReadsOptions(Program):
    def __init__(self, kind):
        super().__init__(0.0)
        slotted = Slotted()
        slotted.scale = 1.0
        self.options = Options(model={"nested": Options(scale=1.0), "slots": slotted, "any": AnyName()}[kind])

    def forward(self, x, edge_index):
        return super().forward(x, edge_index) * self.options.model.scale


@pytest.mark.parametrize("kind", ["nested", "slots", "any"])
def test_options_in_objects_of_objects_are_seen(device, graph, kind):
    ordinary, model, replay = pair_with_ordinary(ReadsOptions(kind), device)
    learn(model, graph, 12)
    learn(ordinary, graph, 12)
    assert replay.replayed > 0
    for trained in (ordinary, model):
        options = trained.options.model
        if kind == "any":
            options.held["scale"] = 2.0
        else:
            options.scale = 2.0

    torch.testing.assert_close(evaluate(model, graph), evaluate(ordinary, graph), rtol=1e-6, atol=1e-8)


class Draws(Program):
    def __init__(self, dropout):
        super().__init__(dropout)
        self.draw = np.random.default_rng(0)

    def forward(self, x, edge_index):
        return super().forward(x, edge_index) * self.draw.random()


class ReadsTable(Program):
    def forward(self, x, edge_index):
        return super().forward(x, edge_index) + TABLE[0].rows


class Table:
    __slots__ = ("rows",)


class Prints(Program):
    def forward(self, x, edge_index):
        print("forward")
        return super().forward(x, edge_index)


class GivesBack(Program):
    def forward(self, x, edge_index):
        return super().forward(x, edge_index), x


class Counts(Program):
    def forward(self, x, edge_index):
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x, edge_index)


class Assigns(Program):
    def forward(self, x, edge_index):
        x = x.clone()
        x[x < 0] = 0
        return super().forward(x, edge_index)


def test_numbers_that_a_model_assigns_are_no_tensors_of_others(device, graph):
    model = Assigns(0.0).double().to(device)
    replay = accelerate(model, replay="auto").replay
    for _ in range(12):
        model(graph.x, graph.edge_index)

    assert replay.reason is None
    assert replay.replayed > 0


@pytest.mark.parametrize(("kind", "reason"), [
    (ReadsTable, r"forward reads a tensor of shape \(5,\) that is neither an argument nor held by the model"),
    (Prints, "forward calls print"),
    (GivesBack, "the model gives an argument or a parameter back"),
    (Counts, "changes again and again"),
    (Draws, "forward may draw from a Generator of the host"),
])  # fmt: skip
def test_what_cannot_be_replayed_is_said_once(device, graph, kind, reason, caplog):
    TABLE[:] = [Table()]
    TABLE[0].rows = torch.ones(CLASSES, device=device)
    model = kind(0.0).double().to(device)
    replay = accelerate(model, replay="auto").replay
    with caplog.at_level("INFO"):
        for _ in range(40):
            model(graph.x, graph.edge_index)

    assert replay.replayed == 0
    said = [line for line in caplog.messages if "not replayed" in line]
    assert len(said) <= 1
    assert re.search(reason, replay.reason)


def test_what_a_model_keeps_is_read_again(device, graph):
    """PyG's layers may keep normalized edges, until they are told to forget them."""
    torch.manual_seed(0)

    class Cached(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.prop = torch.nn.Linear(32, CLASSES), APPNP(2, 0.1, cached=True)

        def forward(self, x, edge_index):
            return self.prop(self.lin(x), edge_index)

    ordinary, model, replay = pair_with_ordinary(Cached(), device)
    assert_learns_alike(ordinary, model, graph)
    assert replay.replayed > 0
    other = Graph(device, seed=1)
    for trained in (ordinary, model):
        trained.prop.reset_parameters()
    assert_learns_alike(ordinary, model, other)


def test_a_model_is_found_on_the_stack(device, graph):
    model = Program().double().to(device)
    accelerate(model, replay=False)
    for conv in (model.conv1, model.conv2):
        conv.__dict__["_paths"] = SearchingPaths()
    wrapped = torch.nn.Sequential()
    wrapped.inner = model

    learn(model, graph, 12)

    assert model._replay.replayed > 0
    assert "_replay" not in model.conv1.__dict__
    assert type(model.conv1._paths) is not SearchingPaths


class HasMore(Program):
    """Model of which one layer is not called."""

    def __init__(self):
        super().__init__(0.0)
        self.more = torch.nn.Linear(3, 3)


def test_what_a_pass_does_not_use_gets_no_gradient(device, graph):
    ordinary, model, replay = pair_with_ordinary(HasMore(), device)
    # Adam would enlarge the rounding of a bias before a norm, whose gradient is 0.
    decay = lambda model: torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.1)  # noqa: E731

    assert_learns_alike(ordinary, model, graph, make_optimizer=decay)

    assert replay.replayed > 0
    assert [part.grad for part in model.more.parameters()] == [None, None]
    with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
        torch.autograd.grad(find_loss(model, graph), model.more.weight)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_of_whole_graphs(device, graph, reentrant):
    def step(model, graph, optimizer):
        model.train()
        optimizer.zero_grad()
        out = checkpoint(model, graph.x, graph.edge_index, use_reentrant=reentrant)
        loss = F.cross_entropy(out, graph.y)
        loss.backward()
        optimizer.step()
        return loss.item()

    torch.manual_seed(0)
    ordinary, model, replay = pair_with_ordinary(GCN(32, 16, 2, CLASSES, dropout=0.5), device)
    graph.x.requires_grad_()

    assert_learns_alike(ordinary, model, graph, step=step)

    assert replay._passes.keys() == {(False, False)}


def test_inference_mode_and_evaluation_take_turns(device, graph):
    ordinary, model, replay = pair_with_ordinary(Program(), device)
    learn(model, graph, 12)
    learn(ordinary, graph, 12)
    before = replay.replayed
    for number in range(24):
        found = []
        for trained in (ordinary.eval(), model.eval()):
            with torch.inference_mode(number < 12), torch.no_grad():
                found.append(trained(graph.x.roll(number, 0), graph.edge_index))
        torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-8)
        assert found[1].is_inference() == (number < 12)

    assert replay.reason is None
    assert replay.replayed > before + 4


def test_shapes_that_change_in_each_pass_are_ordinary(device, graph):
    ordinary, model, replay = pair_with_ordinary(Program(0.0), device)
    for number in range(40):
        part = graph.edge_index[:, number:]
        torch.testing.assert_close(model(graph.x, part), ordinary(graph.x, part), rtol=1e-6, atol=1e-8)

    assert (replay.replayed, replay.ordinary) == (0, 40)
    assert replay.reason == "what the model holds, or is called with besides a batch, changes again and again"


def test_graphs_that_take_turns_are_recorded_ever_more_seldom(device, graph):
    ordinary, model, replay = pair_with_ordinary(Program(0.0), device)
    graphs, recorded = [graph, Graph(device, seed=1)], []
    graphs[1].x, graphs[1].edge_index = graphs[1].x[:50], graphs[1].edge_index[:, (graphs[1].edge_index < 50).all(0)]
    graphs[1].y, graphs[1].mask = graphs[1].y[:50], graphs[1].mask[:50]
    for turn in range(8):
        found = [evaluate(model, graphs[turn % 2]) for _ in range(10)]
        torch.testing.assert_close(found[-1], evaluate(ordinary, graphs[turn % 2]), rtol=1e-6, atol=1e-8)
        recorded.append(replay._passes[False, False][0].recording)

    assert replay.reason is None
    assert len(set(recorded)) == 2


def test_parts_that_torch_compiles_are_left_to_it(device, graph):
    model = Program(0.0).double().to(device)
    # As by `model.norm.compile()`.
    model.norm._compiled_call_impl = model.norm._call_impl
    replay = accelerate(model, replay="auto").replay

    learn(model, graph, 12)

    assert (replay.replayed, replay.reason) == (0, None)


@pytest.mark.full
def test_a_model_that_torch_compiles_gives_results_of_pyg(device, graph):
    ordinary, model, replay = pair_with_ordinary(Program(0.0), device)
    compiled = torch.compile(model, backend="eager")

    for _ in range(12):
        torch.testing.assert_close(evaluate(compiled, graph), evaluate(ordinary, graph), rtol=1e-6, atol=1e-8)

    assert replay.replayed == 0


@pytest.mark.gpu
def test_a_recording_that_takes_much_memory_is_refused(monkeypatch):
    monkeypatch.setattr(recorded_passes, "_MOST_KEPT", 0)
    _, model, replay = pair_with_ordinary(Program(), "cuda")

    learn(model, Graph("cuda"), 12)

    assert replay.replayed == 0
    assert re.search("a recording would take .* GiB more of the GPU's memory", replay.reason)


@pytest.mark.gpu
def test_memory_that_torch_has_cached_can_hold_a_recording(monkeypatch):
    # The driver has next to nothing free, as torch keeps it all.
    real = torch.cuda.memory_stats_as_nested_dict

    def keep_all(device):
        found = real(device)
        found["reserved_bytes"]["all"]["current"] += 1 << 30
        return found

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (0, 1 << 34))
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", keep_all)
    _, model, replay = pair_with_ordinary(Program(), "cuda")

    learn(model, Graph("cuda"), 12)

    assert replay.replayed > 0


@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_machine_with_a_gpu_replays_by_default(monkeypatch, has_gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)

    made = accelerate(Program())

    assert (made.replay is not None) == has_gpu
    assert accelerate(Program(), replay=False).replay is None
    assert accelerate(GCNConv(3, 3)).replay is None
    assert "Replay" not in repr(made)


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_models_that_move(place):
    torch.manual_seed(0)
    graph = Graph("cuda")
    ordinary, model, replay = pair_with_ordinary(Program(), "cuda")
    for trained in (ordinary, model):
        learn(trained, graph, 12)
        trained.to("cpu").to(place)
    assert replay.replayed > 0

    assert_learns_alike(ordinary, model, Graph(place))
