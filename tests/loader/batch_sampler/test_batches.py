"""Which seeds make up which batch, and under which draws."""

import itertools

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from pyg_direct import NeighborLoader
from pyg_direct.errors import IdError
from tests.batches import assert_equal_epochs, check_contract, make_data
from tests.graphs import GRAPHS


def make_loader(device="cpu", **options):
    return NeighborLoader(make_data(), [3, 2], **{"batch_size": 16, "seed": 1, "device": device, **options})


def seeds_of(batches):
    """Seeds of every batch."""
    return [batch.n_id[: batch.batch_size].tolist() for batch in batches]


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


def test_without_input_nodes_every_node_is_a_seed(real_device):
    batches = list(make_loader(real_device))

    assert flat(seeds_of(batches)) == list(range(70))
    assert flat(batch.input_id.tolist() for batch in batches) == list(range(70))


@pytest.mark.parametrize("make", [list, tuple, torch.tensor, lambda ids: torch.tensor(ids, dtype=torch.int32),
                                  lambda ids: torch.tensor(ids).numpy()])  # fmt: skip
def test_input_id_is_the_position_among_ids(real_device, make):
    ids = [60, 3, 3, 41]

    batches = list(make_loader(real_device, input_nodes=make(ids), batch_size=3))

    assert seeds_of(batches) == [[60, 3, 3], [41]]
    assert [batch.input_id.tolist() for batch in batches] == [[0, 1, 2], [3]]


@pytest.mark.parametrize("make", [lambda mask: mask, lambda mask: mask.numpy(), lambda mask: mask.tolist()])
def test_input_id_is_the_node_under_a_mask(real_device, make):
    mask = torch.arange(70) % 20 == 3

    batches = list(make_loader(real_device, input_nodes=make(mask), batch_size=3))

    assert seeds_of(batches) == [[3, 23, 43], [63]]
    assert [batch.input_id.tolist() for batch in batches] == [[3, 23, 43], [63]]


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"disjoint": True}, {"ranks": (1, 2)}])
def test_input_id_is_kept_and_saved_without_those_of_other_batches(options):
    batches = list(make_loader(**options))

    for batch in batches:
        assert batch.input_id.untyped_storage().nbytes() == 8 * batch.batch_size


def test_input_ids_of_the_user_are_kept():
    loader = make_loader(input_nodes=torch.tensor([5, 6, 7]), input_id=torch.tensor([50, 60, 70]))

    (batch,) = loader

    assert batch.input_id.tolist() == [50, 60, 70]


@pytest.mark.parametrize("nodes", [[], torch.empty(0, dtype=torch.int64), torch.zeros(70, dtype=torch.bool)], ids=str)
@pytest.mark.parametrize("shuffle", [False, True])
def test_without_seeds_there_are_no_batches(nodes, shuffle):
    loader = make_loader(input_nodes=nodes, shuffle=shuffle)

    batches = list(loader)

    assert batches == []
    assert len(loader) == 0


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [32, 32, 6]), (True, [32, 32])])
@pytest.mark.parametrize("shuffle", [False, True])
def test_the_last_batch_is_short_or_dropped(real_device, shuffle, drop_last, sizes):
    loader = make_loader(real_device, batch_size=32, shuffle=shuffle, drop_last=drop_last)

    batches = list(loader)

    assert [batch.batch_size for batch in batches] == sizes
    assert len(loader) == len(sizes)


def test_a_batch_larger_than_all_seeds_is_dropped_or_holds_them_all():
    whole, dropped = make_loader(batch_size=99), make_loader(batch_size=99, drop_last=True)

    assert seeds_of(whole) == [list(range(70))]
    assert list(dropped) == []


def test_no_batch_size_gives_single_seeds():
    batches = list(make_loader(batch_size=None, input_nodes=[4, 9]))

    assert seeds_of(batches) == [[4], [9]]


def test_every_epoch_has_an_order_of_its_own(real_device):
    loader = make_loader(real_device, shuffle=True)

    epochs = [flat(seeds_of(loader)) for _ in range(3)]

    assert [sorted(epoch) for epoch in epochs] == [list(range(70))] * 3
    assert len({tuple(epoch) for epoch in [*epochs, range(70)]}) == 4


def test_every_epoch_and_batch_has_draws_of_its_own(real_device):
    loader = make_loader(real_device, input_nodes=torch.zeros(48, dtype=torch.int64))

    draws = [tuple(batch.e_id.tolist()) for _ in range(2) for batch in loader]

    assert len(set(draws)) == 6


@pytest.mark.parametrize("shuffle", [False, True])
def test_equal_seeds_give_equal_epochs(real_device, shuffle):
    loader, other = (make_loader(real_device, shuffle=shuffle) for _ in range(2))

    for _ in range(2):
        # The state of torch's generators plays no part.
        torch.rand(3)
        assert_equal_epochs(loader, other)


def test_different_seeds_give_different_epochs(real_device):
    loaders = [make_loader(real_device, shuffle=True, seed=seed) for seed in (1, 2, 2**64 + 3, -1)]

    epochs = [tuple(flat(seeds_of(loader))) for loader in loaders]

    assert len(set(epochs)) == 4
    assert [loader.seed for loader in loaders] == [1, 2, 3, 2**64 - 1]


def test_without_a_seed_loaders_differ_and_repeat_with_the_program():
    torch.manual_seed(1)
    first, second = list(make_loader(seed=None, shuffle=True)), list(make_loader(seed=None, shuffle=True))

    torch.manual_seed(1)
    again = list(make_loader(seed=None, shuffle=True))

    assert seeds_of(first) != seeds_of(second)
    assert_equal_epochs(first, again)


def test_a_generator_of_the_user_shuffles(real_device):
    orders = [
        seeds_of(make_loader(real_device, shuffle=True, generator=torch.Generator().manual_seed(seed)))
        for seed in (3, 3, 4)
    ]

    assert sorted(flat(orders[0])) == list(range(70))
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize("make_sampler", [
    lambda generator: {"shuffle": True},
    lambda generator: {"sampler": SubsetRandomSampler(range(50), generator=generator)},
    lambda generator: {"sampler": RandomSampler(range(70), replacement=True, generator=generator)}],
    ids=["shuffled", "subset", "replacement"])  # fmt: skip
def test_a_generator_gives_the_orders_that_it_gives_torchs_own_loader(real_device, make_sampler):
    ours, theirs = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)

    loader = make_loader(real_device, generator=ours, **make_sampler(ours))
    expected = DataLoader(range(70), batch_size=16, collate_fn=list, generator=theirs, **make_sampler(theirs))

    for _ in range(2):
        assert seeds_of(loader) == list(expected)
    # Others may draw from it, too.
    assert torch.equal(ours.get_state(), theirs.get_state())


@pytest.mark.parametrize(
    "make_sampler",
    [lambda data: SequentialSampler(data), lambda data: SequentialSampler(data[:21]), lambda data: range(60, 4, -1),
     lambda data: RandomSampler(data, replacement=True, num_samples=33, generator=torch.Generator().manual_seed(1)),
     lambda data: SubsetRandomSampler([5, 50, 7], generator=torch.Generator().manual_seed(1))],
    ids=["sequential", "first ones", "list", "replacement", "subset"],
)  # fmt: skip
def test_a_sampler_of_the_user_chooses_the_seeds(real_device, make_sampler):
    expected = list(make_sampler(range(70)))

    batches = list(make_loader(real_device, sampler=make_sampler(range(70))))

    assert flat(seeds_of(batches)) == expected
    assert [batch.batch_size for batch in batches] == [len(part) for part in torch.tensor(expected).split(16)]


@pytest.mark.parametrize(("positions", "wrong"), [([3, 70], 70), ([3, -1], -1)])
def test_positions_that_are_none_are_named(real_device, positions, wrong):
    loader = make_loader(real_device, sampler=positions)

    with pytest.raises(IdError, match=rf"the sampler must give positions of input nodes, in \[0, 70\), got {wrong}"):
        list(loader)


def test_a_batch_sampler_of_the_user_chooses_the_batches(real_device):
    lists = [[5, 9, 5], [0], [], [69, 68]]
    data = make_data()

    batches = list(NeighborLoader(data, [3, 2], batch_sampler=lists, device=real_device))

    assert seeds_of(batches) == lists
    for batch, seeds in zip(batches, lists, strict=True):
        check_contract(data, batch, seeds, [3, 2])


def test_a_batch_sampler_of_torch_may_wrap_any_sampler():
    sampler = BatchSampler(range(69, -1, -1), batch_size=20, drop_last=True)

    batches = list(NeighborLoader(make_data(), [3], batch_sampler=sampler, device="cpu"))

    assert flat(seeds_of(batches)) == list(range(69, 9, -1))


def make_ranks(device, count, **options):
    """A loader for each of two processes."""
    return [
        NeighborLoader(make_data(GRAPHS["hub"]), [5], torch.zeros(count, dtype=torch.int64), seed=1, device=device,
                       sampler=DistributedSampler(range(count), 2, rank, shuffle=False), **options)
        for rank in range(2)
    ]  # fmt: skip


def test_ranks_share_out_the_seeds():
    samplers = [DistributedSampler(range(70), 2, rank, seed=3) for rank in range(2)]

    first, second = (flat(seeds_of(make_loader(sampler=sampler))) for sampler in samplers)

    assert sorted(first + second) == list(range(70))


def test_ranks_together_draw_what_one_process_draws(real_device):
    alone = NeighborLoader(
        make_data(GRAPHS["hub"]), [5], torch.zeros(8, dtype=torch.int64), seed=1, batch_size=1, device=real_device
    )
    expected = list(alone)

    ranks = [list(loader) for loader in make_ranks(real_device, 8, batch_size=1)]

    assert [len(batches) for batches in ranks] == [4, 4]
    for number, batch in enumerate(expected):
        got = ranks[number % 2][number // 2]
        assert got.input_id.tolist() == [number]
        assert got.e_id.tolist() == batch.e_id.tolist()


def test_no_two_ranks_draw_alike(real_device):
    ranks = make_ranks(real_device, 40, batch_size=4)

    draws = [tuple(batch.e_id.tolist()) for loader in ranks for batch in loader]

    assert len(draws) == len(set(draws)) == 10


def test_set_epoch_shuffles_the_ranks_anew():
    sampler = DistributedSampler(range(70), 2, 0, seed=3)
    loader = make_loader(sampler=sampler)
    epochs = []

    for epoch in range(2):
        sampler.set_epoch(epoch)
        epochs.append(flat(seeds_of(loader)))

    assert epochs[0] != epochs[1]
