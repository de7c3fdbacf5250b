"""Rows of a graph that require a gradient: they are learned as by PyG's own loader."""

import copy

import pytest
import torch
from torch.nn import Parameter
from torch_geometric.loader import NodeLoader as PygNodeLoader

from pyg_direct import (
    HGTLoader,
    LinkNeighborLoader,
    NeighborLoader,
    NodeLoader,
    Producers,
    ShaDowKHopSampler,
    inference_loader,
    to_unified,
)
from pyg_direct.errors import ArgumentError
from pyg_direct.sampler import NeighborSampler
from tests.batches import make_data
from tests.hetero_data import make_hetero

SEEDS = torch.arange(60)
OPTIONS = {"batch_size": 20, "seed": 3}
# Loaders of a graph without types.
LOADERS = {
    "uniform": lambda data, **options: NeighborLoader(data, [3, 2], SEEDS, **options),
    "made ahead": lambda data, **options: NeighborLoader(data, [3, 2], SEEDS, prefetch=3, **options),
    "when asked for": lambda data, **options: NeighborLoader(data, [3, 2], SEEDS, prefetch=0, **options),
    "super-batches": lambda data, **options: NeighborLoader(data, [3, 2], SEEDS, super_batch=4, **options),
    "disjoint": lambda data, **options: NeighborLoader(data, [3, 2], SEEDS, disjoint=True, **options),
    "by what is learned": lambda data, **options: NeighborLoader(data, [3, 2], SEEDS, weight_attr="weight", **options),
    "induced": lambda data, **options: NeighborLoader(data, [3], SEEDS, subgraph_type="induced", **options),
    "own sampler": lambda data, **options: NodeLoader(data, NeighborSampler(data, [3, 2], device=options["device"]),
                                                      SEEDS, **options),
    "links": lambda data, **options: LinkNeighborLoader(data, [3, 2], data.edge_index[:, :60], neg_sampling="binary",
                                                        **options),
    "graphs of seeds": lambda data, **options: ShaDowKHopSampler(data, 2, 3, SEEDS, **options),
}  # fmt: skip


# (where batches are, where the rows are that are learned)
PLACES = pytest.mark.parametrize(("device", "place"), [
    ("cpu", "cpu"), pytest.param("cuda", "cpu", marks=pytest.mark.gpu),
    pytest.param("cuda", "cuda", marks=pytest.mark.gpu)])  # fmt: skip


def make_graph(place, width=4):
    data = make_data()
    data.x = Parameter(torch.randn(data.num_nodes, width, device=place))
    data.weight = (1 + torch.rand(data.num_edges, device=place)).requires_grad_()
    return data


def learn(data, loader, num_epochs=2):
    """The losses of a model whose rows are learned, each of whose batches is held to the rows as they are then."""
    optimizer, losses = torch.optim.Adam([data.x, data.weight], 0.1), []
    for _ in range(num_epochs):
        for batch in loader:
            assert torch.equal(batch.x.cpu(), data.x.detach()[batch.n_id.to(data.x.device)].cpu())
            assert torch.equal(batch.weight.cpu(), data.weight.detach()[batch.e_id.to(data.x.device)].cpu())
            loss = batch.x.pow(2).mean() + batch.weight.pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


@PLACES
@pytest.mark.parametrize("name", LOADERS)
def test_batches_carry_the_gradient_and_have_the_rows_of_the_last_step(device, place, name):
    data = make_graph(place)
    before = copy.deepcopy(data)
    loader = LOADERS[name](data, device=device, **OPTIONS)

    losses = learn(data, loader)

    assert losses[-1] < 0.7 * losses[0]
    assert not torch.equal(data.x, before.x)
    # All else is there as before.
    batch = next(iter(loader))
    assert batch.y.device.type == batch.x.device.type == device
    assert not batch.y.requires_grad


@PLACES
def test_equals_pygs_own_loader(device, place):
    data = make_graph(place)
    other = copy.deepcopy(data)
    options = {"input_nodes": SEEDS, "batch_size": 20}

    losses = learn(data, NeighborLoader(data, [-1, -1], device=device, **options))

    sampler = NeighborSampler(other, [-1, -1], device="cpu")
    assert losses == pytest.approx(learn(other, PygNodeLoader(other, sampler, **options)), rel=1e-5)
    torch.testing.assert_close(data.x, other.x, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(data.weight, other.weight, rtol=1e-4, atol=1e-5)


TYPED = {
    "uniform": lambda data, seeds, **options: NeighborLoader(data, [3, 2], seeds, **options),
    "super-batches": lambda data, seeds, **options: NeighborLoader(data, [3, 2], seeds, super_batch=4, **options),
    "disjoint": lambda data, seeds, **options: NeighborLoader(data, [3, 2], seeds, disjoint=True, **options),
    "hgt": lambda data, seeds, **options: HGTLoader(data, [8, 8], seeds, **options),
}


@PLACES
@pytest.mark.parametrize("name", TYPED)
def test_rows_of_a_type_are_learned(device, place, name):
    data, target = make_hetero(), "paper"
    data["author"].x = Parameter(torch.randn(data["author"].num_nodes, 4, device=place))
    loader = TYPED[name](data, (target, torch.arange(40)), batch_size=8, device=device)
    optimizer, first = torch.optim.SGD([data["author"].x], 1.0), data["author"].x.detach().clone()

    for batch in loader:
        rows = data["author"].x.detach()
        assert torch.equal(batch["author"].x.cpu(), rows[batch["author"].n_id.to(rows.device)].cpu())
        optimizer.zero_grad()
        batch["author"].x.square().sum().backward()
        optimizer.step()

    assert not torch.equal(data["author"].x, first)
    assert not batch[target].x.requires_grad


def test_what_derives_from_ours_and_a_transform_have_rows_with_their_gradient(real_device):
    class Derived(NeighborLoader):
        def filter_fn(self, out):
            batch = super().filter_fn(out)
            assert batch.x.requires_grad
            return batch

    def double(batch):
        batch.doubled = 2 * batch.x
        return batch

    data = make_graph("cpu")
    for kind in (NeighborLoader, Derived):
        loader = kind(data, [3, 2], SEEDS, transform=double, device=real_device, prefetch=2, **OPTIONS)
        learn(data, loader)
        data.x.grad = None
        next(iter(loader)).doubled.sum().backward()
        assert data.x.grad is not None
        data.x.grad = None
        loader([1, 5]).x.sum().backward()
        assert data.x.grad is not None


def test_rows_are_learned_from_the_epoch_on_that_asks_for_it(real_device):
    data = make_graph("cpu")
    data.x.requires_grad_(False)
    loader = NeighborLoader(data, [3, 2], SEEDS, device=real_device, **OPTIONS)
    assert not any(batch.x.requires_grad for batch in loader)

    data.x.requires_grad_(True)
    losses = learn(data, loader)
    data.x.requires_grad_(False)
    batch = next(iter(loader))

    assert losses[-1] < losses[0]
    assert not batch.x.requires_grad
    assert torch.equal(batch.x.cpu(), data.x[batch.n_id.cpu()])


def test_without_gradients_rows_carry_none(real_device):
    data = make_graph("cpu")
    loader = NeighborLoader(data, [3, 2], SEEDS, device=real_device, **OPTIONS)

    with torch.no_grad():
        assert not any(batch.x.requires_grad for batch in loader)


def test_batches_of_other_processes_are_refused():
    data = make_graph("cpu")
    loader = NeighborLoader(data, [3, 2], SEEDS, device="cpu", **OPTIONS)

    with pytest.raises(ArgumentError, match=r"loader must be one whose rows .* got data.x that requires one"):
        Producers(loader)
    # What has no rows may be made anywhere.
    Producers(inference_loader(data, device="cpu"), device="cpu").close()


@pytest.mark.parametrize("name", ["uniform", "disjoint"])
def test_unified_rows_are_learned(real_device, name):
    data = make_graph("cpu")
    data.x = to_unified(torch.randn(data.num_nodes, 4)).requires_grad_()
    loader = LOADERS[name](data, device=real_device, **OPTIONS)

    for batch in loader:
        rows, ids = data.x.detach().cpu(), batch.n_id.cpu()
        assert torch.equal(batch.x.detach().cpu(), rows[ids])
        batch.x.sum().backward()
        expected = torch.bincount(ids, minlength=len(rows)).float()[:, None].expand_as(rows)
        assert torch.equal(data.x.grad.cpu(), expected)
        with torch.no_grad():
            data.x.sub_(data.x.grad)
        data.x.grad = None
