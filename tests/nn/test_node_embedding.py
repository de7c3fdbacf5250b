"""Rows that are learned, beside `torch.nn.Embedding(sparse=True)`, in every kind of memory."""

import copy
import io

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import HeteroData
from torch_geometric.nn import HeteroConv, SAGEConv

import pyg_direct
from pyg_direct import CSRTopo, LinkNeighborLoader, NeighborLoader, NodeEmbedding, SparseAdam, SparseSGD
from pyg_direct.errors import ArgumentError, ArgumentTypeError, DeviceError, IdError
from pyg_direct.nn.replay import batch_passes
from tests.nn.embeddings import make_pair
from tests.nn.replays import record_anywhere
from tests.processes import run_ranks


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(7,), (0,), (3, 4), ()])
def test_rows_and_gradients_equal_those_of_torch(place, shape, dtype):
    theirs, ours = make_pair(place)
    ids = torch.randint(40, shape, device=place["device"]).to(dtype)

    expected, got = theirs(ids), ours(ids)
    weight = torch.randn_like(expected)
    for rows in (expected, got):
        (rows * weight).sum().backward()

    assert torch.equal(got, expected)
    assert ours.weight.grad.is_sparse
    assert ours.weight.grad.shape == (40, 5)
    torch.testing.assert_close(ours.weight.grad.to_dense(), theirs.weight.grad.to_dense())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_rows_have_any_floating_dtype(place, dtype):
    theirs, ours = make_pair(place, dtype=dtype)
    ids = torch.tensor([3, 39, 3], device=place["device"])

    got = ours(ids)
    got.sum().backward()

    assert got.dtype == ours.weight.grad.dtype == dtype
    assert torch.equal(got, theirs(ids))


def test_gradients_of_several_passes_add_up(place):
    theirs, ours = make_pair(place)
    for table in (theirs, ours):
        for ids in ([1, 2], [2, 2, 39]):
            table(torch.tensor(ids, device=place["device"])).square().sum().backward()

    torch.testing.assert_close(ours.weight.grad.to_dense(), theirs.weight.grad.to_dense())


def test_a_gradient_has_memory_of_its_own(place):
    _, ours = make_pair(place)
    bias = torch.zeros(2, 5, device=place["device"], requires_grad=True)

    (ours(torch.tensor([1, 2], device=place["device"])) + bias).square().sum().backward()
    before = bias.grad.clone()
    ours.weight.grad._values().zero_()

    assert torch.equal(bias.grad, before)
    assert before.abs().sum() > 0


def test_frozen_rows_have_no_gradient(place):
    rows = NodeEmbedding.from_pretrained(torch.randn(4, 2), **place)

    got = rows(torch.tensor([1], device=place["device"]))

    assert not got.requires_grad


def test_no_nodes_and_wide_rows(real_device):
    rows = NodeEmbedding(0, 300, device=real_device)

    assert rows(torch.empty(0, dtype=torch.int64, device=real_device)).shape == (0, 300)


def test_initial_rows_are_those_of_torch():
    torch.manual_seed(3)
    theirs = torch.nn.Embedding(20, 4)
    torch.manual_seed(3)
    ours = NodeEmbedding(20, 4, device="cpu")
    before = ours.weight.detach().clone()

    ours.reset_parameters()

    assert torch.equal(before, theirs.weight)
    assert not torch.equal(ours.weight, before)


def test_it_tells_where_its_rows_lie(place):
    rows = NodeEmbedding(40, 5, **place)

    asked, cache = place["placement"], place["device_cache_size"]
    assert rows.placement == (place["device"].type if asked == "auto" else asked)
    assert rows.num_hot_rows == 40 * int(str(cache).removesuffix("%")) // 100
    assert repr(rows).startswith(f"NodeEmbedding(40, 5, placement='{rows.placement}'")


def test_a_cpu_has_one_memory():
    rows = NodeEmbedding(4, 2, device="cpu", placement="unified", device_cache_size="50%")

    assert (rows.placement, rows.num_hot_rows) == ("cpu", 0)


# Bad input.


@pytest.mark.parametrize(("ids", "error", "words"), [
    (torch.tensor([3, 40]), IdError, r"n_id must lie in \[0, 40\), got 40"),
    (torch.tensor([-1]), IdError, r"n_id must lie in \[0, 40\), got -1"),
    (torch.tensor([1.0]), ArgumentTypeError, "n_id must have dtype int64 or int32, got torch.float32: give its .long"),
    ([1, 2], ArgumentTypeError, "n_id must be a tensor, got list"),
    (torch.empty(2, dtype=torch.int64, device="meta"), ArgumentError,
     r"n_id must be on cpu, as the rows are, got meta: give its .to\('cpu'\)"),
])  # fmt: skip
def test_bad_ids_are_named(ids, error, words):
    rows = NodeEmbedding(40, 5, device="cpu")

    with pytest.raises(error, match=words):
        rows(ids)


@pytest.mark.gpu
@pytest.mark.parametrize("cache", [0, "20%"])
@pytest.mark.parametrize("placement", ["cuda", "unified", "pinned"])
def test_bad_ids_on_a_gpu_train_no_row_and_are_raised_by_the_next_call(placement, cache):
    rows = NodeEmbedding(40, 5, placement=placement, device_cache_size=cache)
    before, optimizer = rows.weight.detach().clone(), SparseSGD(rows.parameters(), lr=1.0)

    got = rows(torch.tensor([3, 40, -1], device="cuda"))
    got.sum().backward()
    optimizer.step()

    expected = before.clone()
    expected[3] -= 1
    assert got[1:].abs().sum() == 0
    assert torch.equal(rows.weight, expected)
    with pytest.raises(IdError, match=r"n_id must lie in \[0, 40\); an earlier read had an id outside at position 1"):
        rows(torch.tensor([3], device="cuda"))
    with pytest.raises(ArgumentError, match="n_id must be on cuda:0, as the rows are, got cpu"):
        rows(torch.tensor([3]))


@pytest.mark.parametrize(("options", "error", "words"), [
    ({"num_embeddings": -1}, ArgumentError, "num_embeddings must be an integer of at least 0, got -1"),
    ({"embedding_dim": 0}, ArgumentError, "embedding_dim must be an integer of at least 1, got 0"),
    ({"dtype": torch.int64}, ArgumentTypeError, "dtype must be one of torch.float32, .*, got torch.int64"),
    ({"placement": "disk"}, ArgumentError, "placement must be one of auto, cuda, unified, pinned, got 'disk'"),
    ({"placement": "cuda"}, ArgumentError, "placement='cuda' needs a GPU, got device='cpu'"),
    ({"hotness": "age"}, ArgumentError, "hotness must be one of"),
    ({"hotness": torch.ones(3)}, ArgumentError, "hotness must hold a score for each of the 4 rows, got 3"),
    ({"csr_topo": CSRTopo(torch.tensor([[0], [4]]))}, ArgumentError, "csr_topo must be a CSRTopo of at most 4 nodes"),
    ({"csr_topo": "degree"}, ArgumentError, "csr_topo must be a CSRTopo of at most 4 nodes, got 'degree'"),
    ({"device_cache_size": "20"}, ArgumentError, "device_cache_size must have a unit"),
    ({"max_norm": 1.0}, ArgumentTypeError, "max_norm"),
    ({"padding_idx": 0}, ArgumentTypeError, "padding_idx"),
])  # fmt: skip
def test_bad_options_are_named(options, error, words):
    with pytest.raises(error, match=words):
        NodeEmbedding(**{"num_embeddings": 4, "embedding_dim": 2, "device": "cpu", **options})


def test_other_rows_are_refused():
    with pytest.raises(ArgumentTypeError, match="embeddings must be a tensor, got list"):
        NodeEmbedding.from_pretrained([[1.0]])
    with pytest.raises(ArgumentError, match=r"embeddings must have shape \[N, D\], got \(3,\)"):
        NodeEmbedding.from_pretrained(torch.ones(3))
    with pytest.raises(ArgumentTypeError, match="dtype must be one of"):
        NodeEmbedding.from_pretrained(torch.ones(3, 2).long(), device="cpu")


def test_a_gpu_that_is_missing_is_named():
    if torch.cuda.is_available():
        return

    with pytest.raises(DeviceError, match="asks for a GPU"):
        NodeEmbedding(4, 2, device="cuda")


# Checkpoints, copies and moves.


def test_checkpoints_are_those_of_torch(place):
    theirs, ours = make_pair(place)
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    other = NodeEmbedding(40, 5, **place)
    ids = torch.tensor([39, 0, 12], device=place["device"])

    other.load_state_dict(torch.load(file, weights_only=True))
    theirs.load_state_dict(ours.state_dict())

    assert list(ours.state_dict()) == ["weight"]
    assert torch.equal(other(ids), ours(ids))
    assert torch.equal(theirs(ids), ours(ids))


def test_a_table_on_the_host_is_saved_from_there(place):
    rows = NodeEmbedding(40, 5, **place)

    saved = rows.state_dict()["weight"]

    assert saved.is_cuda == (rows.placement == "cuda")
    assert torch.equal(saved.cpu(), rows.weight.detach().cpu())


def test_assigned_rows_are_copied_where_memory_stays(place):
    rows = NodeEmbedding(40, 5, **place)
    weight = rows.weight

    rows.load_state_dict({"weight": torch.ones(40, 5, device=place["device"])}, assign=True)

    assert rows(torch.tensor([0, 39], device=place["device"])).unique().tolist() == [1]
    assert (rows.weight is weight) == (place["placement"] != "auto")


def test_a_checkpoint_of_another_size_is_refused(place):
    rows = NodeEmbedding(40, 5, **place)

    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        rows.load_state_dict({"weight": torch.ones(39, 5)})


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_have_rows_of_their_own_of_the_same_kind(place, way):
    rows = NodeEmbedding(40, 5, **place)
    ids = torch.tensor([0, 39], device=place["device"])
    before = rows(ids).detach()
    if way == "deepcopy":
        made = copy.deepcopy(torch.nn.ModuleDict({"user": rows}))["user"]
    else:
        file = io.BytesIO()
        torch.save(rows, file)
        file.seek(0)
        made = torch.load(file, weights_only=False)

    made(ids).sum().backward()
    SparseSGD(made.parameters(), lr=1.0).step()

    assert torch.equal(rows(ids), before)
    torch.testing.assert_close(made(ids), before - 1)
    assert repr(made) == repr(rows)


def test_rows_of_a_gpu_open_on_a_machine_without_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    source = NodeEmbedding(40, 5, device="cpu")
    state = {**source.__getstate__(), "_placed": ("unified", torch.device("cuda", 0), None)}

    made = NodeEmbedding.__new__(NodeEmbedding)
    made.__setstate__(state)

    assert made.placement == "cpu"
    assert made(torch.tensor([1, 39])).shape == (2, 5)
    assert torch.equal(made(torch.tensor([3])), source(torch.tensor([3])))


def test_hot_rows_follow_what_torch_writes(place):
    rows = NodeEmbedding(40, 5, **place)
    ids = torch.tensor([0, 39], device=place["device"])

    with torch.no_grad():
        rows.weight.fill_(2)
    after_fill = rows(ids).unique().tolist()
    rows(ids).sum().backward()
    torch.optim.SGD(rows.parameters(), lr=1.0).step()

    assert after_fill == [2]
    assert rows(ids).unique().tolist() == [1]


def test_a_table_on_the_host_stays_there(place):
    rows = NodeEmbedding(40, 5, **place)
    moved = rows.to(place["device"]).train()

    assert moved is rows
    if place["placement"] == "auto":
        assert rows.double().weight.dtype == torch.float64
        assert rows(torch.tensor([1], device=place["device"])).dtype == torch.float64
    else:
        with pytest.raises(ArgumentError, match=r"stays there, as torch.float32 .* got a move to torch.float64"):
            rows.double()


# In programs.


@pytest.fixture(scope="module")
def shop():
    """Users and items; only items have rows."""
    generator = torch.Generator().manual_seed(0)
    ends = [torch.randint(size, (400,), generator=generator) for size in (90, 70)]
    data = HeteroData(user={"num_nodes": 90}, item={"x": torch.randn(70, 8, generator=generator)})
    data["user", "buys", "item"].edge_index = torch.stack(ends)
    data["item", "of", "user"].edge_index = torch.stack(ends[::-1])
    data["item"].y = torch.randint(3, (70,), generator=generator)
    return data


class Model(torch.nn.Module):
    """Two layers over users, whose rows are learned, and items."""

    def __init__(self, users):
        super().__init__()
        self.users = users
        kinds = [("user", "buys", "item"), ("item", "of", "user")]
        self.layers = torch.nn.ModuleList(HeteroConv({kind: SAGEConv((8, 8), 8) for kind in kinds}) for _ in range(2))

    def forward(self, batch):
        x = {"user": self.users(batch["user"].n_id), "item": batch["item"].x}
        for layer in self.layers:
            x = layer(x, batch.edge_index_dict)
        return x["item"][: batch["item"].batch_size]


def make_models(place):
    torch.manual_seed(0)
    theirs = Model(torch.nn.Embedding(90, 8, sparse=True)).to(place["device"])
    ours = Model(NodeEmbedding(90, 8, **place)).to(place["device"])
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    return theirs, ours


def find_loss(model, batch):
    return torch.nn.functional.cross_entropy(model(batch), batch["item"].y[: batch["item"].batch_size])


def train(model, make, loader):
    rest = [parameter for name, parameter in model.named_parameters() if not name.startswith("users.")]
    optimizers, losses = [make(model.users.parameters()), torch.optim.Adam(rest, lr=0.01)], []
    for batch in loader:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = find_loss(model, batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        losses.append(float(find_loss(model.eval(), batch)))
    return losses


@pytest.mark.parametrize("disjoint", [False, True])
def test_an_accelerated_model_trains_as_with_torch(shop, place, disjoint, monkeypatch):
    record_anywhere(place["device"], monkeypatch)
    theirs, ours = make_models(place)
    pyg_direct.accelerate(ours)
    loader = NeighborLoader(shop, [3, 2], "item", batch_size=20, seed=1, disjoint=disjoint, device=place["device"])

    expected = train(theirs, lambda params: torch.optim.SparseAdam(list(params), lr=0.1), loader)
    loader = NeighborLoader(shop, [3, 2], "item", batch_size=20, seed=1, disjoint=disjoint, device=place["device"])
    losses = train(ours, lambda params: SparseAdam(params, lr=0.1), loader)

    assert losses == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(ours.users.weight, theirs.users.weight, rtol=1e-4, atol=1e-5)


def test_a_scaler_skips_steps_and_scales_gradients_back(place):
    theirs, ours = make_pair(place)
    optimizers = [torch.optim.SparseAdam(list(theirs.parameters()), lr=0.1), SparseAdam(ours.parameters(), lr=0.1)]
    scalers = [torch.amp.GradScaler(place["device"].type, init_scale=1024.0) for _ in optimizers]

    for ids, factor in (([1, 2, 1], 1.0), ([3, 39], float("inf")), ([3, 1], 2.0)):
        for table, optimizer, scaler in zip((theirs, ours), optimizers, scalers, strict=True):
            optimizer.zero_grad()
            rows = table(torch.tensor(ids, device=place["device"]))
            scaler.scale((rows.square() * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()

    assert [scaler.get_scale() for scaler in scalers] == [512, 512]
    torch.testing.assert_close(ours.weight, theirs.weight)


def test_links_between_two_learned_types(shop, place):
    tables = torch.nn.ModuleDict({kind: NodeEmbedding(shop[kind].num_nodes, 4, **place) for kind in ("user", "item")})
    optimizer = SparseAdam(tables.parameters(), lr=0.1)
    loader = LinkNeighborLoader(shop, [2], ("user", "buys", "item"), neg_sampling="binary", batch_size=50, seed=0,
                                device=place["device"])  # fmt: skip
    means = []
    for _ in range(4):
        total = 0.0
        for batch in loader:
            optimizer.zero_grad()
            user, item = batch["user", "buys", "item"].edge_label_index
            score = (tables["user"](batch["user"].n_id)[user] * tables["item"](batch["item"].n_id)[item]).sum(1)
            label = batch["user", "buys", "item"].edge_label
            loss = torch.nn.functional.binary_cross_entropy_with_logits(score, label.float())
            loss.backward()
            optimizer.step()
            total += float(loss.detach())
        means.append(total)

    assert means[-1] < means[0]


def test_passes_without_gradients_have_the_rows_of_now(shop, place, monkeypatch):
    record_anywhere(place["device"], monkeypatch)
    monkeypatch.setattr(batch_passes, "_MARGIN", 0.5)
    theirs, ours = make_models(place)
    replay = pyg_direct.accelerate(ours, replay="auto").replay
    loader = NeighborLoader(shop, [3, 2], "item", batch_size=10, seed=1, drop_last=True, device=place["device"])
    for model in (theirs, ours):
        model.eval()

    for number, batch in enumerate(batch for _ in range(4) for batch in loader):
        with torch.no_grad():
            for model in (theirs, ours):
                model.users.weight.add_(number)
            torch.testing.assert_close(ours(batch), theirs(batch))

    # A recorded pass would neither copy hot rows anew nor name an id that is out of range.
    assert replay.replayed == 0


def test_passes_with_sparse_gradients_are_ordinary(shop, place, monkeypatch):
    record_anywhere(place["device"], monkeypatch)
    monkeypatch.setattr(batch_passes, "_MARGIN", 0.5)
    _, ours = make_models(place)
    replay = pyg_direct.accelerate(ours, replay="auto").replay
    loader = NeighborLoader(shop, [3, 2], "item", batch_size=10, seed=1, drop_last=True, device=place["device"])

    for batch in (batch for _ in range(3) for batch in loader):
        find_loss(ours, batch).backward()
        assert ours.users.weight.grad.is_sparse

    assert replay.replayed == 0


# Several processes.


def _make_alike():
    torch.manual_seed(0)
    batches = [[[1, 2, 2], [19]], [[2, 5], []]]
    return torch.randn(20, 3), [[torch.tensor(ids, dtype=torch.int64) for ids in of_rank] for of_rank in batches]


def _loss(rows, step):
    return (rows.square().sum(1) * (step + 1)).sum() + rows.sum()


def _train_of_group(rank, way, kind):
    """Return the rows that a process began and ended with, on the CPU."""
    start, batches = _make_alike()
    device = torch.device(kind, rank if kind == "cuda" else None)
    group = torch.distributed.new_group(backend="nccl" if kind == "cuda" else "gloo")
    torch.manual_seed(rank)
    if way == "group":
        table = NodeEmbedding(20, 3, device=device, placement="unified", device_cache_size="20%", process_group=group)
        begin = table.weight.detach().cpu()
        table.load_state_dict({"weight": start})
        model = table
        with pytest.raises(ArgumentTypeError, match="with a process_group cannot be copied"):
            copy.deepcopy(table)
    else:
        table = NodeEmbedding.from_pretrained(start, freeze=False, device=device)
        begin = table.weight.detach().clone()
        model = DistributedDataParallel(table)
    optimizer = SparseAdam(table.parameters(), lr=0.1)
    for step, ids in enumerate(batches[rank]):
        optimizer.zero_grad()
        _loss(model(ids.to(device)), step).backward()
        optimizer.step()
    return begin, table.weight.detach().cpu()


@pytest.mark.slow
@pytest.mark.parametrize(("way", "kind"), [
    ("group", "cpu"), ("DistributedDataParallel", "cpu"),
    pytest.param("group", "cuda", marks=[pytest.mark.gpu, pytest.mark.gpus]),
])  # fmt: skip
def test_processes_train_one_table(way, kind):
    start, batches = _make_alike()
    table = torch.nn.Embedding.from_pretrained(start.clone(), freeze=False, sparse=True)
    optimizer = torch.optim.SparseAdam(list(table.parameters()), lr=0.1)
    for step, parts in enumerate(zip(*batches, strict=True)):
        optimizer.zero_grad()
        (sum(_loss(table(ids), step) for ids in parts) / 2).backward()
        optimizer.step()

    (begin, first), (other_begin, second) = run_ranks(_train_of_group, 2, way, kind)

    assert torch.equal(begin, other_begin)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, table.weight.detach())
