"""Optimizers of rows, beside torch's for sparse gradients, in every kind of memory."""

import copy
import io
from functools import partial

import pytest
import torch

from pyg_direct import NodeEmbedding, SparseAdagrad, SparseAdam, SparseSGD
from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.nn.sparse_optimizers import sum_by_id
from pyg_direct.runtime.cuda.graph_capture import waits_refused
from tests.nn.embeddings import make_pair

# Ours and torch's, with options of both.
PAIRS = {
    "SGD": (SparseSGD, torch.optim.SGD, {"lr": 0.1}),
    "SGD, maximized": (SparseSGD, torch.optim.SGD, {"lr": 0.1, "maximize": True}),
    "Adagrad": (SparseAdagrad, torch.optim.Adagrad, {"lr": 0.1}),
    "Adagrad, decayed": (SparseAdagrad, torch.optim.Adagrad,
                         {"lr": 0.1, "lr_decay": 0.3, "initial_accumulator_value": 0.2, "eps": 1e-3}),
    "Adam": (SparseAdam, torch.optim.SparseAdam, {"lr": 0.1}),
    "Adam, maximized": (SparseAdam, torch.optim.SparseAdam,
                        {"lr": 0.02, "betas": (0.4, 0.6), "eps": 1e-3, "maximize": True}),
}  # fmt: skip


@pytest.fixture(params=PAIRS)
def pair(request):
    """Makers of our optimizer and of torch's."""
    ours, theirs, options = PAIRS[request.param]
    return partial(ours, **options), lambda params: theirs(list(params), **options)


def step(table, optimizer, ids, target, scale=1.0):
    optimizer.zero_grad()
    loss = (table(ids) - target).square().sum() * scale
    loss.backward()
    optimizer.step()


def draw(place, count=30):
    return torch.randint(40, (count,), device=place["device"]), torch.randn(count, 5, device=place["device"])


def test_rows_are_trained_as_by_torch(place, pair):
    theirs, ours = make_pair(place)
    tables, optimizers = (ours, theirs), [make(t.parameters()) for make, t in zip(pair, (ours, theirs), strict=True)]

    for _ in range(12):
        ids, target = draw(place)
        for table, optimizer in zip(tables, optimizers, strict=True):
            step(table, optimizer, ids, target)

    torch.testing.assert_close(ours.weight, theirs.weight)


def test_unique_ids_without_a_step_before_are_trained_as_by_torch(place, pair):
    theirs, ours = make_pair(place)
    ids, target = torch.tensor([39, 3, 0], device=place["device"]), torch.randn(3, 5, device=place["device"])

    for table, make in zip((ours, theirs), pair, strict=True):
        step(table, make(table.parameters()), ids, target)

    torch.testing.assert_close(ours.weight, theirs.weight)


def test_other_rows_stay_as_they_are(place, pair):
    _, ours = make_pair(place)
    before = ours.weight.detach().clone()

    step(ours, pair[0](ours.parameters()), torch.tensor([3, 0, 3], device=place["device"]), 7.0)

    changed = (ours.weight != before).any(1).nonzero().view(-1)
    assert changed.tolist() == [0, 3]


def test_batches_without_nodes_change_nothing(place, pair):
    theirs, ours = make_pair(place)
    optimizer = pair[0](ours.parameters())

    step(ours, optimizer, torch.empty(0, dtype=torch.int64, device=place["device"]), 0.0)
    optimizer.zero_grad()
    optimizer.step()

    assert torch.equal(ours.weight, theirs.weight)


def test_equal_batches_give_equal_rows_to_the_last_bit(place):
    found = []
    ids, target = draw(place, 3000)
    start = torch.randn(40, 5)
    for _ in range(2):
        table = NodeEmbedding.from_pretrained(start, freeze=False, **place)
        optimizer = SparseAdam(table.parameters(), lr=0.1)
        for _ in range(3):
            step(table, optimizer, ids, target)
        found.append(table.weight.detach())

    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_rows_of_one_id_are_summed_in_their_order(real_device, dtype):
    ids = torch.randint(9, (500,), device=real_device)
    rows = torch.randn(500, 3, dtype=dtype, device=real_device)
    grad = torch.sparse_coo_tensor(ids[None], rows, (9, 3))

    own, sums = sum_by_id(grad)

    is_row = own >= 0
    expected = torch.zeros(9, 3, dtype=torch.float64).index_add_(0, ids.cpu(), rows.cpu().double())
    assert own[is_row].tolist() == list(range(9))
    assert is_row.sum() == 9
    # Of 60 rows each, added up in fp32 at least.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(sums[is_row].cpu().double(), expected, rtol=60 * eps, atol=60 * eps)


def test_gradients_that_are_summed_are_taken_as_they_are():
    grad = torch.sparse_coo_tensor(torch.tensor([[2, 0, 2]]), torch.ones(3, 1), (3, 1)).coalesce()

    ids, sums = sum_by_id(grad)

    assert (ids.tolist(), sums.tolist()) == ([0, 2], [[1], [2]])


def test_checkpoints_go_on_and_so_do_those_of_torch(place, pair):
    theirs, ours = make_pair(place)
    make, make_theirs = pair
    optimizer, expected = make(ours.parameters()), make_theirs(theirs.parameters())
    for _ in range(3):
        ids, target = draw(place)
        step(ours, optimizer, ids, target)
        step(theirs, expected, ids, target)
    file = io.BytesIO()
    torch.save({"rows": ours.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = NodeEmbedding(40, 5, **place)
    again.load_state_dict(saved["rows"])
    loaded = make(again.parameters())
    loaded.load_state_dict(saved["optimizer"])

    from_torch = make(ours.parameters())
    from_torch.load_state_dict(copy.deepcopy(expected.state_dict()))
    ids, target = draw(place)
    for table, own in ((again, loaded), (ours, from_torch), (theirs, expected)):
        step(table, own, ids, target)

    for table in (again, ours):
        torch.testing.assert_close(table.weight, theirs.weight)


def test_a_checkpoint_of_adam_goes_on_in_torch(place):
    theirs, ours = make_pair(place)
    optimizer = SparseAdam(ours.parameters(), lr=0.1)
    step(ours, optimizer, *draw(place))
    theirs.load_state_dict(ours.state_dict())
    loaded = torch.optim.SparseAdam(list(theirs.parameters()), lr=0.1)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    ids, target = draw(place)
    step(ours, optimizer, ids, target)
    step(theirs, loaded, ids, target)

    torch.testing.assert_close(ours.weight, theirs.weight)


def test_tables_of_a_checkpoint_lie_where_the_rows_do(place):
    rows = NodeEmbedding(40, 5, **place)
    optimizer = SparseAdam(rows.parameters())
    step(rows, optimizer, torch.tensor([1], device=place["device"]), 0.0)

    saved = optimizer.state_dict()["state"][0]

    assert list(saved) == ["step", "exp_avg", "exp_avg_sq"]
    assert saved["exp_avg"].is_cuda == (rows.placement == "cuda")
    assert saved["exp_avg"].abs().sum(1).nonzero().tolist() == [[1]]


def test_checkpoints_of_others_are_refused(place):
    rows = NodeEmbedding(40, 5, **place)
    ids = torch.tensor([1], device=place["device"])
    first, second = SparseAdagrad(rows.parameters()), SparseAdam(rows.parameters())
    step(rows, first, ids, 0.0)
    step(rows, second, ids, 0.0)
    smaller = second.state_dict()
    smaller["state"][0]["exp_avg"] = torch.zeros(39, 5)

    with pytest.raises(ArgumentError, match="state_dict must be of SparseAdam, got one without 'exp_avg'"):
        second.load_state_dict(first.state_dict())
    with pytest.raises(ArgumentError, match=r"exp_avg of the shape of parameter 0, \(40, 5\), got \(39, 5\)"):
        second.load_state_dict(smaller)
    with pytest.raises(ArgumentError, match="state_dict must be without momentum, which SparseSGD lacks"):
        SparseSGD(rows.parameters()).load_state_dict(torch.optim.SGD(rows.parameters(), momentum=0.9).state_dict())


def test_schedules_and_groups_are_those_of_torch(place):
    theirs, ours = make_pair(place)
    more, other = make_pair(place)
    made = []
    for make, tables in ((SparseAdam, (ours, other)), (torch.optim.SparseAdam, (theirs, more))):
        groups = [{"params": list(tables[0].parameters())}, {"params": list(tables[1].parameters()), "lr": 0.01}]
        made.append(make(groups, lr=0.1))
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in made]

    for _ in range(4):
        ids, target = draw(place)
        for optimizer, schedule, tables in zip(made, schedules, ((ours, other), (theirs, more)), strict=True):
            optimizer.zero_grad()
            sum((table(ids) - target).square().sum() for table in tables).backward()
            optimizer.step()
            schedule.step()

    torch.testing.assert_close(ours.weight, theirs.weight)
    torch.testing.assert_close(other.weight, more.weight)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [SparseSGD, SparseAdagrad, SparseAdam])
@pytest.mark.parametrize("cache", [0, "20%"])
@pytest.mark.parametrize("placement", ["cuda", "unified", "pinned"])
def test_a_step_does_not_wait_for_the_gpu(placement, cache, make):
    place = {"device": torch.device("cuda", torch.cuda.current_device()), "placement": placement,
             "device_cache_size": cache}  # fmt: skip
    table = NodeEmbedding(40, 5, **place)
    optimizer, (ids, target) = make(table.parameters(), lr=0.1), draw(place)
    step(table, optimizer, ids, target)
    torch.cuda.synchronize()

    with waits_refused():
        step(table, optimizer, ids, target)

    assert bool(table.weight.isfinite().all())


def test_a_closure_gives_the_loss(place):
    _, ours = make_pair(place)
    optimizer = SparseSGD(ours.parameters(), lr=0.1)

    def find_loss():
        loss = ours(torch.tensor([1], device=place["device"])).sum()
        loss.backward()
        return loss

    before = ours.weight[1].sum().item()
    assert optimizer.step(find_loss).item() == pytest.approx(before)
    assert ours.weight[1].sum().item() == pytest.approx(before - 0.5)


def test_tables_of_torch_are_trained_too(real_device):
    table = torch.nn.Embedding(4, 2, sparse=True, device=real_device)
    before = table.weight.detach().clone()

    optimizer = SparseSGD(table.parameters(), lr=1.0)
    table(torch.tensor([1, 1], device=real_device)).sum().backward()
    optimizer.step()

    torch.testing.assert_close((before - table.weight)[1], torch.full((2,), 2.0, device=real_device))


def test_dense_gradients_are_named():
    table = torch.nn.Embedding(4, 2)
    table(torch.tensor([1])).sum().backward()

    with pytest.raises(ArgumentError, match=r"SparseAdam needs sparse gradients, got a dense one of shape \(4, 2\)"):
        SparseAdam(table.parameters()).step()


@pytest.mark.parametrize("param", [torch.zeros(3), torch.zeros(2, 2).to_sparse(), torch.zeros(2, 2).to(torch.cfloat),
                                   torch.zeros(2, 3).t()])  # fmt: skip
def test_other_parameters_are_named(param):
    with pytest.raises(ArgumentTypeError, match=r"params must be contiguous tables \[N, D\] of a floating dtype"):
        SparseSGD([torch.nn.Parameter(param)])


@pytest.mark.parametrize(("options", "error", "words"), [
    ({"momentum": 0.9}, ArgumentError, "params must be without momentum, which SparseAdagrad lacks, got 0.9"),
    ({"lr": -1}, ArgumentError, "lr must be at least 0 and finite, got -1"),
    ({"lr": "x"}, ArgumentTypeError, "lr must be a number, got 'x'"),
])  # fmt: skip
def test_bad_options_of_a_group_are_named(options, error, words):
    first, other = (torch.nn.Embedding(4, 2).weight for _ in range(2))
    optimizer = SparseAdagrad([first])

    with pytest.raises(error, match=words):
        optimizer.add_param_group({"params": [other], **options})

    assert len(optimizer.param_groups) == 1


def change_state(state, change):
    change(state)
    return state


@pytest.mark.parametrize(("change", "words"), [
    (lambda state: state["state"][0].update(exp_avg=torch.zeros(6, 2)),
     r"state_dict must have exp_avg of the shape of parameter 0, \(4, 2\), got \(6, 2\)"),
    (lambda state: state["state"][0].update(exp_avg_sq=None), "got one without 'exp_avg_sq'"),
    (lambda state: state["state"].update({7: state["state"][0]}), "got a state of 7 and parameters"),
    (lambda state: state.pop("state"), "got one without 'state'"),
    (lambda state: state["param_groups"][0].update(weight_decay=0.1), "state_dict must be without weight_decay"),
])  # fmt: skip
def test_a_state_that_is_refused_changes_nothing(change, words):
    table = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = SparseAdam(table.parameters(), lr=0.1)
    table(torch.tensor([1])).sum().backward()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["lr"] = 7.0

    with pytest.raises(ArgumentError, match=words):
        optimizer.load_state_dict(change_state(state, change))

    assert optimizer.param_groups[0]["lr"] == 0.1
    optimizer.step()


def test_a_rate_of_nothing_changes_nothing():
    table = torch.nn.Embedding(4, 2, sparse=True)
    before = table.weight.detach().clone()
    table(torch.tensor([1])).sum().backward()

    SparseSGD(table.parameters(), lr=0.0).step()

    assert torch.equal(table.weight, before)


@pytest.mark.parametrize(("make", "options", "error", "words"), [
    (SparseAdam, {"lr": 0.0}, ArgumentError, "lr must be above 0 and finite, got 0.0"),
    (SparseSGD, {"lr": -1.0}, ArgumentError, "lr must be at least 0 and finite, got -1.0"),
    (SparseSGD, {"lr": "1"}, ArgumentTypeError, "lr must be a number, got '1'"),
    (SparseSGD, {"maximize": 3}, ArgumentTypeError, "maximize must be True or False"),
    (SparseAdagrad, {"eps": -1.0}, ArgumentError, "eps must be at least 0 and finite, got -1.0"),
    (SparseAdagrad, {"lr_decay": float("nan")}, ArgumentError, "lr_decay must be at least 0"),
    (SparseAdagrad, {"initial_accumulator_value": -1}, ArgumentError, "initial_accumulator_value must be at least 0"),
    (SparseAdam, {"betas": 0.9}, ArgumentTypeError, "betas must be two numbers, got 0.9"),
    (SparseAdam, {"betas": (0.9, 1.0)}, ArgumentError, r"betas must lie in \[0, 1\), got 1.0"),
    (SparseAdam, {"eps": 0}, ArgumentError, "eps must be above 0"),
])  # fmt: skip
def test_bad_options_are_named(make, options, error, words):
    with pytest.raises(error, match=words):
        make(NodeEmbedding(4, 2, device="cpu").parameters(), **options)
