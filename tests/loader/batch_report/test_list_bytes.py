"""A loader's report tells the bytes of neighbor lists that sampling reads over the link."""

import pytest

from pyg_direct import LinkNeighborLoader, NeighborLoader
from pyg_direct.graph.placed_topology import ListReads
from tests.batches import make_data


def make_nodes(device="cpu", **options):
    return NeighborLoader(make_data(), [3, 2], batch_size=16, seed=1, device=device, **options)


def make_links(device="cpu", **options):
    return LinkNeighborLoader(make_data(), [3, 2], neg_sampling="binary", batch_size=200, device=device, **options)


@pytest.mark.parametrize("super_batch", [1, 2])
@pytest.mark.parametrize("make", [make_nodes, make_links])
def test_bytes_of_lists_are_those_of_what_was_sampled(make, super_batch, monkeypatch):
    loader = make(super_batch=super_batch, prefetch=0)
    monkeypatch.setattr(type(loader), "_find_reads", lambda self: ListReads(16, 4, True))
    loader.record()
    batches = [batch for _ in range(2) for batch in loader]

    report = loader.report()

    rows = sum(sum(batch.num_sampled_nodes[:-1]) for batch in batches)
    edges = sum(batch.edge_index.shape[1] for batch in batches)
    assert rows > 0
    assert edges > 0
    assert report.list_bytes == 16 * rows + 4 * edges
    assert report.list_bytes_are_most


def test_lists_that_the_cpu_reads_come_over_no_link():
    loader = make_nodes()
    loader.record()
    list(loader)

    assert loader.report().list_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("placement", ["cuda", "unified", "pinned"])
@pytest.mark.parametrize("make", [make_nodes, make_links])
def test_bytes_of_lists_over_the_link(make, placement):
    loader = make("cuda", placement=placement)
    loader.record()
    # Offsets, and ids of edges, fit GPU memory.
    edges = sum(batch.edge_index.shape[1] for batch in loader)

    report = loader.report()

    assert report.list_bytes == (0 if placement == "cuda" else 4 * edges)
    assert not report.list_bytes_are_most
    assert ("neighbor lists over PCIe" in str(report)) == (placement != "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("super_batch", [1, 3])
def test_cached_lists_make_it_a_bound(super_batch):
    loader = make_nodes("cuda", placement="unified", topology_cache="20%", super_batch=super_batch)
    loader.record()
    edges = sum(batch.edge_index.shape[1] for batch in loader)

    report = loader.report()

    assert report.list_bytes == 4 * edges
    assert report.list_bytes_are_most
    assert "by what was sampled, at most: " in str(report)
