"""Batches of sets of nodes that a GPU makes in groups equal those that are made alone."""

import pickle

import pytest
import torch
from torch_geometric.data import Data

from pyg_direct import ClusterData, ClusterLoader, PPRLoader, RandomNodeLoader
from pyg_direct.loader import induced_loader
from pyg_direct.ops.run_kernel import runs_on_gpu
from tests.loader.cluster_loader.test_cluster_loader import assert_equal
from tests.loader.induced_loader.test_induced_loader import LOADERS

GENERATOR = torch.Generator().manual_seed(1)
DATA = Data(x=torch.rand(40, 3, generator=GENERATOR), y=torch.arange(40), edge_attr=torch.arange(200),
            train_mask=torch.arange(40) < 20, level=torch.ones(2), names=[str(node) for node in range(40)],
            edge_index=torch.randint(40, (2, 200), generator=GENERATOR))  # fmt: skip


@pytest.fixture
def groups(monkeypatch):
    """Numbers of batches of the groups that are made."""
    sizes, submit = [], induced_loader.GrowingSets.submit

    def note(self, number, work):
        sizes.append(len(work))
        return submit(self, number, work)

    monkeypatch.setattr(induced_loader.GrowingSets, "submit", note)
    return sizes


def make_clusters(device, sparse_format="csr", **options):
    clusters = ClusterData(DATA, 9, log=False, sparse_format=sparse_format)
    return ClusterLoader(clusters, device=device, **{"batch_size": 2, "shuffle": True, "seed": 3, **options})


def assert_equal_epochs(loader, other):
    got, expected = list(loader), list(other)
    assert len(got) == len(expected)
    for batch, alone in zip(got, expected, strict=True):
        assert_equal(batch.cpu(), alone.cpu())
        assert batch.edge_index.is_contiguous()


@pytest.mark.parametrize("sparse_format", ["csr", "csc"])
def test_clusters_in_groups_are_those_alone(device, groups, sparse_format):
    loaders = [make_clusters(device, sparse_format, prefetch=prefetch) for prefetch in (1, 0)]

    assert_equal_epochs(*loaders)

    assert groups == ([1, 2, 2] if runs_on_gpu(torch.empty(0, device=device)) else [])


@pytest.mark.parametrize("name", sorted(set(LOADERS) - {"ClusterLoader", "PPRLoader", "Node2Vec"}))
def test_sets_in_groups_are_those_alone(device, groups, name):
    loaders = [LOADERS[name](seed=3, device=device, prefetch=prefetch) for prefetch in (1, 0)]

    assert_equal_epochs(*loaders)

    assert groups == ([1, 2, 2] if runs_on_gpu(torch.empty(0, device=device)) else [])


def test_clusters_that_come_twice_or_have_no_nodes(device):
    loader = make_clusters(device, prefetch=1)
    loader._prepare()
    bounds, plan = loader._begins.copy(), loader._plan
    bounds[4] = bounds[3]
    owners = torch.repeat_interleave(torch.arange(9), torch.from_numpy(bounds).diff()).int().to(device)
    chosen = [torch.tensor(own) for own in ([1, 0, 1], [3], [5, 3, 2])]
    if not runs_on_gpu(plan.lists.indptr):
        # A CPU makes each batch alone.
        return

    got = plan.submit_ranges(bounds, owners, [own.numpy() for own in chosen]).finish()

    for own, sample in zip(chosen, got, strict=True):
        nodes = torch.cat([torch.arange(bounds[c], bounds[c + 1]) for c in own.tolist()])
        alone = plan.sample(nodes)
        assert torch.equal(sample.n_id.cpu(), nodes)
        assert torch.equal(sample.edge_index, alone.edge_index)
        assert torch.equal(sample.e_id, alone.e_id)


def test_batches_that_wait_for_the_program_are_made_alone(real_device, groups):
    given = make_clusters(real_device, batch_size=1, shuffle=False, batch_sampler=[[0, 1], [2]])
    several = make_clusters(real_device, prefetch=2)
    seeds = PPRLoader(DATA, 2, batch_size=20, device=real_device)

    assert [len(list(loader)) for loader in (given, several, seeds)] == [2, 5, 2]
    assert groups == []


def test_tables_limit_the_batches_of_a_group(real_device, groups, monkeypatch):
    monkeypatch.setattr(induced_loader, "_TABLE_ENTRIES", 2 * 40)
    parts = {"shuffle": True, "seed": 3, "device": real_device}

    assert_equal_epochs(RandomNodeLoader(DATA, 7, prefetch=1, **parts), RandomNodeLoader(DATA, 7, prefetch=0, **parts))

    assert set(groups) <= {1, 2}


def test_groups_go_on_where_a_state_was_taken(real_device):
    loader, other = (make_clusters(real_device, prefetch=1, batch_size=1) for _ in range(2))
    batches, expected = iter(loader), list(other)
    for _ in range(4):
        next(batches)

    sent = pickle.loads(pickle.dumps(loader))
    sent.load_state_dict(loader.state_dict())

    rest = list(sent)
    assert len(rest) == 5
    for batch, alone in zip(rest, expected[4:], strict=True):
        assert_equal(batch.cpu(), alone.cpu())


@pytest.mark.filterwarnings("ignore:rows of data were written")
def test_rows_written_within_an_epoch_reach_the_next_batch(real_device):
    data = DATA.clone()
    clusters = ClusterData(data, 9, log=False)
    batches = iter(ClusterLoader(clusters, batch_size=1, device=real_device, prefetch=1))
    for _ in range(3):
        next(batches)

    clusters.data.x += 100

    assert all(bool((batch.x >= 100).all()) for batch in batches)
