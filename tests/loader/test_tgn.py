"""`LastNeighborLoader` and `TGNMemory` have PyG's results, on every device, and go to and from PyG's files."""

import copy
import pickle

import pytest
import torch
import torch_geometric
from torch_geometric.nn.models import tgn as pyg

from pyg_direct import LastNeighborLoader, TGNMemory
from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError
from pyg_direct.loader import tgn

NODES, WIDTH = 30, 4


def draw_events(count, generator, start=0):
    src, dst = torch.randint(NODES, (2, count), generator=generator)
    return src, dst, start + torch.arange(count), torch.rand(count, WIDTH, generator=generator)


class Concatenated(torch.nn.Module):
    """A message with parameters, as a program may have it."""

    def __init__(self):
        super().__init__()
        self.out_channels = 5
        self.lin = torch.nn.Linear(WIDTH + 2 * 6 + 3, 5)

    def forward(self, z_src, z_dst, raw_msg, t_enc):
        return self.lin(torch.cat([z_src, z_dst, raw_msg, t_enc], -1))


MESSAGES = {"identity": lambda: pyg.IdentityMessage(WIDTH, 6, 3), "learned": Concatenated}
AGGREGATORS = {"last": pyg.LastAggregator, "mean": pyg.MeanAggregator}


def make_memory(kind, message="identity", aggregator="last", device="cpu", dtype=None):
    torch.manual_seed(3)
    return kind(NODES, WIDTH, 6, 3, MESSAGES[message](), AGGREGATORS[aggregator]()).to(device, dtype)


def train(memory, device, num_batches=5, count=12):
    """All that an epoch and an evaluation show: memories, times, gradients."""
    generator, seen = torch.Generator().manual_seed(5), []

    def draw(start):
        *ends, t, msg = draw_events(count, generator, start)
        return [*(part.to(device) for part in (*ends, t)), msg.to(device, memory.memory.dtype)]

    memory.train()
    memory.reset_state()
    for batch in range(num_batches):
        events = draw(batch * count)
        z, last_update = memory(torch.randperm(NODES, generator=generator)[:20].to(device))
        memory.zero_grad()
        memory.update_state(*events)
        z.pow(2).sum().backward()
        seen += [z, last_update, *(p.grad for p in memory.parameters() if p.grad is not None)]
        with torch.no_grad():
            for parameter in memory.parameters():
                parameter -= 0.01 * (0 if parameter.grad is None else parameter.grad)
        memory.detach()
    with torch.no_grad():
        memory.eval()
        seen += [memory.memory.clone(), memory.last_update.clone()]
        memory.update_state(*draw(1000))
        seen += memory(torch.arange(NODES, device=device))
    return [value.detach().cpu() for value in seen]


def assert_close(got, expected):
    assert len(got) == len(expected)
    for value, other in zip(got, expected, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("aggregator", AGGREGATORS)
@pytest.mark.parametrize("message", MESSAGES)
def test_results_and_gradients_are_pygs_bit_for_bit_on_a_cpu(message, aggregator):
    expected = train(make_memory(pyg.TGNMemory, message, aggregator), "cpu")

    got = train(make_memory(TGNMemory, message, aggregator), "cpu")

    assert len(got) == len(expected)
    assert all(map(torch.equal, got, expected))


@pytest.mark.gpu
@pytest.mark.parametrize("aggregator", AGGREGATORS)
@pytest.mark.parametrize("message", MESSAGES)
def test_results_and_gradients_are_equal_on_a_gpu(message, aggregator):
    # In float32 a cosine of a time of 1,000 is only known to a few 1e-5.
    expected = train(make_memory(TGNMemory, message, aggregator, dtype=torch.float64), "cpu")

    assert_close(train(make_memory(TGNMemory, message, aggregator, "cuda", torch.float64), "cuda"), expected)


def test_the_latest_message_alone_gives_the_same(device, monkeypatch):
    monkeypatch.setattr(tgn, "runs_on_gpu", lambda tensor: False)
    expected = train(make_memory(TGNMemory), "cpu", 2, 6)
    monkeypatch.setattr(tgn, "runs_on_gpu", lambda tensor: True)

    assert_close(train(make_memory(TGNMemory, device=device), device, 2, 6), expected)


@pytest.mark.parametrize("fills", [True, False])
def test_a_node_without_messages_is_as_in_pyg_with_and_without_torch_scatter(device, monkeypatch, fills):
    monkeypatch.setattr(tgn, "runs_on_gpu", lambda tensor: True)
    tgn._takes_stand_in.cache_clear()
    monkeypatch.setattr(torch_geometric.typing, "WITH_TORCH_SCATTER", False)
    if not fills:
        # As `torch_scatter.scatter_max` has it.
        def argmax(src, index, dim=0, dim_size=None):
            out = index.new_full((dim_size,), src.numel())
            for place in src.argsort(stable=True).tolist():
                out[index[place]] = place
            return out

        monkeypatch.setattr(tgn, "scatter_argmax", argmax)
        monkeypatch.setattr(pyg, "scatter_argmax", argmax)
    event = [torch.tensor([1, 1, 1]), torch.tensor([2, 2, 2]), torch.arange(3), torch.rand(3, WIDTH)]
    n_id = torch.tensor([0, 1, 2])
    ours, theirs = make_memory(TGNMemory, device=device), make_memory(pyg.TGNMemory)
    ours.update_state(*(part.to(device) for part in event))
    theirs.update_state(*event)

    assert tgn._takes_stand_in() == fills
    assert_close([part.cpu() for part in ours(n_id.to(device))], theirs(n_id))
    tgn._takes_stand_in.cache_clear()


def test_times_may_go_backwards_and_be_equal():
    generator = torch.Generator().manual_seed(2)
    made = []
    for kind in (TGNMemory, pyg.TGNMemory):
        generator.manual_seed(2)
        memory = make_memory(kind)
        for _ in range(3):
            src, dst, t, msg = draw_events(9, generator)
            memory.update_state(src, dst, t.flip(0), msg)
        made.append(memory(torch.arange(NODES)))

    assert all(map(torch.equal, *made))


def test_state_dictionaries_load_in_both_directions():
    ours, theirs = make_memory(TGNMemory), make_memory(pyg.TGNMemory)
    train(ours, "cpu")
    theirs.eval()

    theirs.load_state_dict(ours.state_dict())
    again = make_memory(TGNMemory)
    again.load_state_dict(theirs.state_dict())

    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.training = again.training = False
    n_id = torch.arange(NODES)
    assert all(map(torch.equal, theirs(n_id), ours(n_id)))
    assert all(map(torch.equal, again(n_id), ours(n_id)))


def test_messages_with_gradients_are_left_to_pyg():
    made = []
    for kind in (TGNMemory, pyg.TGNMemory):
        memory, generator = make_memory(kind), torch.Generator().manual_seed(5)
        encoder = torch.ones(WIDTH, requires_grad=True)
        src, dst, t, msg = draw_events(9, generator)
        memory.update_state(src, dst, t, msg)
        memory.update_state(src, dst, t + 9, msg * encoder)
        memory(torch.arange(NODES))[0].sum().backward()
        made.append(encoder.grad)
        memory.reset_state()

    assert made[0].abs().max() > 0
    assert torch.equal(*made)


def test_the_store_reads_as_pygs():
    events = draw_events(9, torch.Generator().manual_seed(5))
    ours, theirs = make_memory(TGNMemory), make_memory(pyg.TGNMemory)
    for memory in (ours, theirs):
        memory.update_state(*events)

    for name in ("msg_s_store", "msg_d_store"):
        own, other = getattr(ours, name), getattr(theirs, name)
        assert list(own) == list(other)
        assert all(torch.equal(*pair) for node in other for pair in zip(own[node], other[node], strict=True))
        with pytest.raises(KeyError):
            own[NODES]


def test_copies_and_other_devices_keep_messages(real_device):
    memory = make_memory(TGNMemory)
    memory.update_state(*draw_events(9, torch.Generator().manual_seed(5)))
    memory.detach()
    expected = memory(torch.arange(NODES))

    for other in (copy.deepcopy(memory), pickle.loads(pickle.dumps(memory))):
        assert_close([part.cpu() for part in other.to(real_device)(torch.arange(NODES, device=real_device))], expected)


@pytest.mark.parametrize(("place", "value", "error", "words"), [
    (0, torch.tensor([3, NODES]), IdError, rf"src.* must lie in \[0, {NODES}\), got {NODES}"),
    (1, torch.tensor([-2, 0]), IdError, rf"dst must lie in \[0, {NODES}\), got -2"),
    (2, torch.tensor([0.5, 1.0]), ArgumentTypeError, "t must hold integers, got torch.float32"),
    (2, torch.tensor([1, 2, 3]), ArgumentError, r"t must have shape \(2,\), got \(3,\)"),
    (3, torch.ones(2, WIDTH + 1), ArgumentError, rf"raw_msg must have shape \(2, {WIDTH}\), got \(2, {WIDTH + 1}\)"),
    (3, [[1.0]], ArgumentTypeError, "raw_msg must be a tensor of shape"),
])  # fmt: skip
def test_wrong_events_are_named(real_device, place, value, error, words):
    events = [torch.tensor([3, 4]), torch.tensor([5, 6]), torch.tensor([1, 2]), torch.ones(2, WIDTH)]
    events[place] = value
    memory = make_memory(TGNMemory, device=real_device)

    with pytest.raises(error, match=words if real_device.type == "cpu" else words.replace("dst must", ".*dst must")):
        memory.update_state(*(part.to(real_device) if isinstance(part, torch.Tensor) else part for part in events))


@pytest.mark.parametrize("is_training", [True, False])
def test_nodes_outside_the_graph_are_named(real_device, is_training):
    memory = make_memory(TGNMemory, device=real_device)
    if not is_training:
        memory.eval()

    def step():
        memory(torch.tensor([1, 77], device=real_device))
        # A GPU reports it here.
        memory.update_state(*(part.to(real_device) for part in draw_events(3, torch.Generator())))

    with pytest.raises(IdError, match=rf"n_id must lie in \[0, {NODES}\), got 77"):
        step()
    memory.update_state(*(part.to(real_device) for part in draw_events(3, torch.Generator())))


@pytest.mark.parametrize("name", ["TGNMemory", "LastNeighborLoader"])
def test_objects_made_under_pygs_name_are_saved_as_pygs(name):
    events, n_id = draw_events(9, torch.Generator().manual_seed(5)), torch.arange(NODES)
    made = make_memory(TGNMemory) if name == "TGNMemory" else LastNeighborLoader(NODES, 20)
    made.stand_for(getattr(pyg, name))
    if name == "TGNMemory":
        made.update_state(*events)
        made.detach()
    else:
        made.insert(*events[:2])

    sent = pickle.dumps(made)

    loaded = pickle.loads(sent)
    assert b"pyg_direct" not in sent
    assert type(loaded) is getattr(pyg, name)
    assert all(map(torch.equal, loaded(n_id), made(n_id)))
    assert type(copy.deepcopy(made)) is type(made)


def test_neighbors_are_pygs(real_device):
    ours, theirs = LastNeighborLoader(NODES, 8, real_device), pyg.LastNeighborLoader(NODES, 8, real_device)
    generator = torch.Generator().manual_seed(5)

    for _ in range(6):
        src, dst = draw_events(20, generator)[:2]
        n_id = torch.randperm(NODES, generator=generator)[:9].to(real_device)
        # PyG keeps an arbitrary choice of more events than there is room for.
        assert torch.cat([src, dst]).bincount().max() <= 8
        for loader in (ours, theirs):
            loader.insert(src.to(real_device), dst.to(real_device))

        assert all(map(torch.equal, ours(n_id), theirs(n_id)))
        assert torch.equal(ours.e_id, theirs.e_id)
        assert ours.cur_e_id == theirs.cur_e_id
    ours.reset_state()
    assert ours(n_id)[2].numel() == ours.cur_e_id == 0


def test_the_text_tells_nodes_and_events():
    loader = LastNeighborLoader(NODES, 8)
    loader.insert(torch.tensor([1]), torch.tensor([2]))

    assert repr(loader) == "LastNeighborLoader(30 nodes, size=8, 1 event, cpu)"


@pytest.mark.parametrize(("arguments", "words"), [
    ((0, 3), "num_nodes must be an integer of at least 1, got 0"), ((3, 0), "size must be an integer of at least 1"),
    ((3, 2.5), "size must be an integer of at least 1, got 2.5"),
])  # fmt: skip
def test_wrong_sizes_are_named(arguments, words):
    with pytest.raises(ArgumentError, match=words):
        LastNeighborLoader(*arguments)
