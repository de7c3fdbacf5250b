"""Samplers that go to other processes."""

import pickle

import pytest
import torch

from pyg_direct import GraphSageSampler
from tests.sage import SEEDS, make_sampler


def test_handle_makes_the_sampler_again():
    sampler = make_sampler(mode="CPU")

    handle = sampler.share_ipc()
    copy = GraphSageSampler.lazy_from_ipc_handle(handle)

    assert handle[0].indices.is_shared()
    assert (copy.sizes, copy.mode) == (sampler.sizes, "CPU")
    assert torch.equal(copy.sample(SEEDS, key=3)[0], sampler.sample(SEEDS, key=3)[0])


def sample_in_child(handle, queue):
    n_id, _, adjs = GraphSageSampler.lazy_from_ipc_handle(handle).sample(SEEDS, key=3)
    queue.put((n_id.tolist(), adjs[0].e_id.tolist()))


@pytest.mark.slow
@pytest.mark.usefixtures("quick_starts")
def test_handle_travels_to_another_process():
    sampler = make_sampler(mode="CPU")
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=sample_in_child, args=(sampler.share_ipc(), queue))
    child.start()

    got = queue.get()
    child.join()

    n_id, _, adjs = sampler.sample(SEEDS, key=3)
    assert child.exitcode == 0
    assert got == (n_id.tolist(), adjs[0].e_id.tolist())


def test_pickle_continues_the_sequence(device):
    sampler = make_sampler(device)
    sampler.sample(SEEDS)

    copy = pickle.loads(pickle.dumps(sampler))

    assert torch.equal(copy.sample(SEEDS)[0], sampler.sample(SEEDS)[0])
