"""A loader that is called gives the batch around positions, masks and lists of them; PyG's hooks build batches too."""

import logging
from functools import partial

import pytest
import torch
from torch_geometric.sampler import HeteroSamplerOutput, NodeSamplerInput, SamplerOutput

from pyg_direct import HGTLoader, LinkNeighborLoader, NeighborLoader, NodeLoader, ShaDowKHopSampler
from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.loader import NeighborSampler as LayerSampler
from pyg_direct.sampler import NeighborSampler
from tests.batches import make_data
from tests.hetero_data import check_rows, make_hetero

MASK = [i in (2, 5) for i in range(9)]
POSITIONS = [[2, 5], torch.tensor([2, 5]), torch.tensor(MASK), MASK]
FORMS = ["list", "tensor", "mask", "list of booleans"]


@pytest.mark.parametrize("index", POSITIONS, ids=FORMS)
@pytest.mark.parametrize("options", [{}, {"disjoint": True}], ids=["plan", "general"])
def test_positions_may_come_in_any_form(real_device, index, options):
    loader = NeighborLoader(make_data(), [3], torch.arange(20, 29), device=real_device, **options)

    batch = loader(index)

    assert batch.n_id[: batch.batch_size].tolist() == [22, 25]
    assert batch.input_id.tolist() == [2, 5]


@pytest.mark.parametrize("options", [{}, {"disjoint": True}], ids=["plan", "general"])
def test_no_positions_give_a_batch_of_nothing(real_device, options):
    batch = NeighborLoader(make_data(), [3], torch.arange(20, 29), device=real_device, **options)([])

    assert (batch.batch_size, batch.num_nodes, batch.num_edges) == (0, 0, 0)


@pytest.mark.parametrize("options", [{}, {"disjoint": True}], ids=["plan", "general"])
def test_positions_outside_are_refused(options):
    loader = NeighborLoader(make_data(), [3], torch.arange(20, 29), device="cpu", **options)

    with pytest.raises(ArgumentError, match=r"index must lie in \[0, 9\)"):
        loader([9])


def test_pygs_hook_builds_the_batch_of_a_sample(real_device):
    data = make_hetero()
    loader = NeighborLoader(data, [2, 2], "paper", device=real_device, transform=lambda batch: (batch,))
    out = loader.node_sampler.sample_from_nodes(NodeSamplerInput(torch.arange(2), torch.tensor([3, 7]), None, "paper"))

    (batch,) = loader.filter_fn(out)

    assert batch["paper"].n_id[:2].tolist() == [3, 7]
    check_rows(data, batch)


def test_what_a_sampler_returns_must_be_a_sample():
    loader = NeighborLoader(make_hetero(), [2], "paper", device="cpu", transform_sampler_output=lambda out: "nothing")

    with pytest.raises(TypeError, match="must return a SamplerOutput or a HeteroSamplerOutput, got <class 'str'>"):
        next(iter(loader))


class Marked(NeighborLoader):
    """A loader of a program's, which makes more of each batch."""

    def filter_fn(self, out):
        batch = super().filter_fn(out)
        batch.num_seen = out.metadata[0].numel() if self.transform is None else batch.num_marks
        return batch


class MarkedLinks(LinkNeighborLoader):
    """The same around links."""

    def filter_fn(self, out):
        batch = super().filter_fn(out)
        batch.num_seen = out.metadata[0].numel()
        return batch


def mark(batch):
    batch.num_marks = batch.get("num_marks", 0) + 1
    return batch


@pytest.mark.parametrize("options", [{}, {"disjoint": True}, {"prefetch": 0}, {"super_batch": 2}], ids=str)
def test_a_hook_that_a_program_says_anew_makes_the_batches(real_device, options):
    options = {"num_neighbors": [3], "batch_size": 16, "seed": 1, "device": real_device, **options}

    loader, plain = Marked(make_data(), **options), NeighborLoader(make_data(), **options)
    marked = Marked(make_data(), transform=mark, **options)

    assert [(batch.num_seen, batch.n_id.tolist(), batch.x.tolist()) for batch in loader] == [
        (batch.batch_size, batch.n_id.tolist(), batch.x.tolist()) for batch in plain
    ]
    assert [batch.num_seen for batch in marked] == [1] * len(marked)
    assert (loader([0, 1]).num_seen, marked([0, 1]).num_seen) == (2, 1)


def test_a_hook_that_a_program_says_anew_makes_the_batches_of_links(real_device):
    options = {"num_neighbors": [3], "batch_size": 16, "seed": 1, "device": real_device, "neg_sampling": "binary"}

    loader, plain = MarkedLinks(make_data(), **options), LinkNeighborLoader(make_data(), **options)

    for batch, expected in zip(loader, plain, strict=True):
        assert batch.num_seen == expected.input_id.numel()
        assert torch.equal(batch.n_id[batch.edge_label_index], expected.n_id[expected.edge_label_index])


def test_a_hook_that_would_not_be_called_is_refused():
    class Mine(NeighborLoader):
        def collate_fn(self, index):
            return super().collate_fn(index)

    with pytest.raises(NotImplementedError, match=r"collate_fn of .*Mine would not be called"):
        Mine(make_data(), [3], device="cpu")


BY_HAND = {
    "plan": lambda **options: NeighborLoader(make_data(), [3, 2], **options),
    "general": lambda **options: NeighborLoader(make_data(), [3, 2], disjoint=True, **options),
    "links": lambda **options: LinkNeighborLoader(make_data(), [3, 2], **options),
    "a sampler": lambda **options: NodeLoader(
        make_data(), NeighborSampler(make_data(), [3, 2], device=options["device"]), **options),
    "types": lambda **options: NeighborLoader(make_hetero(), [3, 2], "paper", **options),
    "types that are balanced": lambda **options: HGTLoader(make_hetero(), [8, 8], "paper", **options),
    "graphs of seeds": lambda **options: ShaDowKHopSampler(make_data(), 2, 3, **options),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_collate_fn_that_is_called_by_hand_gives_a_batch_as_pygs(real_device, name):
    loader = BY_HAND[name](device=real_device)
    loader.transform = mark = Marks()

    batch = loader.collate_fn([2, 5])

    assert loader.filter_per_worker
    assert mark.seen == [batch]
    part = batch["paper"] if "types" in name else batch
    assert part.x.device.type == real_device.type
    # As where the second hook was to make the batch.
    assert loader.filter_fn(batch) is batch
    assert mark.seen == [batch]


@pytest.mark.parametrize("name", BY_HAND)
def test_making_a_loader_sets_up_no_logging(monkeypatch, name):
    # What it does beside where nobody has.
    monkeypatch.setattr(logging, "debug", lambda *args: pytest.fail("sets up a handler for all loggers"))

    BY_HAND[name](device="cpu")


@pytest.mark.parametrize("name", list(BY_HAND)[:5])
def test_filter_fn_makes_the_batch_where_collate_fn_is_not_to(real_device, name):
    loader = BY_HAND[name](device=real_device, filter_per_worker=False)

    out = loader.collate_fn(torch.tensor([2, 5]))
    batch = loader.filter_fn(out)

    assert isinstance(out, (SamplerOutput, HeteroSamplerOutput))
    assert (batch["paper"] if name == "types" else batch).input_id.tolist() == [2, 5]


class Marks:
    """A transform that remembers its batches."""

    def __init__(self):
        self.seen = []

    def __call__(self, batch):
        self.seen.append(batch)
        return batch


@pytest.mark.parametrize("name", ["plan", "types", "graphs of seeds", "layers"])
def test_positions_that_are_none_are_named_by_hand_too(name):
    layers = partial(LayerSampler, make_data().edge_index, [2])
    loader = BY_HAND.get(name, layers)(device="cpu")

    for index, words in (([0.5], "must have dtype int64 or int32"), ("all", "must be ids, got 'all'")):
        with pytest.raises(ArgumentTypeError, match=words):
            loader.collate_fn(index)
    assert loader.collate_fn([]) is not None
