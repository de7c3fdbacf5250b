"""Objects that one process of a host gives the others of its group."""

import base64
import json
import multiprocessing
import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist

from pyg_direct.errors import ArgumentError, PygDirectError
from pyg_direct.loader.batch_sampler import Ranks
from pyg_direct.runtime.comm import host_group
from pyg_direct.runtime.comm.host_group import gather, give_to_host, has_group, identify_host
from pyg_direct.runtime.host.shared_memory import share
from tests.processes import run_ranks


def give(rank):
    made = give_to_host(lambda about: (about, share(torch.arange(5) + rank)), f"process {rank}")
    about, memory = made

    def fail(_):
        if rank == 0:
            raise ArgumentError(f"ids must be known to process {rank}")

    errors = []
    for make in (fail, lambda _: Sealed()):
        # The second time, rank 0 is alone on its host.
        for hosts in ("aaa", "abb"):
            host_group.identify_host = partial(hosts.__getitem__, rank)
            try:
                give_to_host(make, None)
            except (PygDirectError, OSError) as error:
                errors.append((type(error).__name__, str(error)))
    return about, memory.view(torch.int64, (5,)).tolist(), errors


class Sealed:
    """Object that the last process cannot open."""

    def __reduce__(self):
        return unseal, ()


def unseal():
    if dist.get_rank() == 2:
        raise OSError("it is sealed")


@pytest.mark.slow
def test_the_first_process_makes_it_and_errors_reach_all():
    results = run_ranks(give, 3)

    assert [result[:2] for result in results] == [(["process 0", "process 1", "process 2"], [0, 1, 2, 3, 4])] * 3
    words = [(0, "ArgumentError", "ids must be known to process 0")] * 2 + [(2, "OSError", "it is sealed")] * 2
    for rank, (*_, errors) in enumerate(results):
        assert errors == [(kind, text) if rank == failed else (
            "PygDirectError", f"process {failed} failed, so that process {rank} gets nothing: {kind}('{text}')")
            for failed, kind, text in words]  # fmt: skip


def refuse(*args, **kwargs):
    raise AssertionError("objects are sent as pickles")


def gather_apart(rank):
    dist.all_gather_object = dist.broadcast_object_list = refuse
    seed = Ranks("auto", "pad").agree_on_seed(2**63 + rank, torch.device("cpu"))
    return gather(["ä" * 1000 * rank, rank, None, (True, 2**70)]), gather(None), seed


def test_what_processes_tell_each_other_is_no_pickle():
    results = run_ranks(gather_apart, 3)

    told = [["ä" * 1000 * rank, rank, None, [True, 2**70]] for rank in range(3)]
    assert results == [(told, [None] * 3, 2**63)] * 3


def give_and_listen(rank):
    told, plain = [], host_group.gather

    def listen(value, *args):
        told.append(json.dumps(value))
        return plain(value, *args)

    host_group.gather = listen
    word = multiprocessing.current_process().authkey
    made = give_to_host(lambda about: (about, share(torch.arange(3))), rank)
    secrets = [word.hex(), base64.b64encode(word).decode(), repr(bytes(word))]
    return made[0], sum(map(len, told)), any(secret in text for secret in secrets for text in told)


def test_no_word_that_opens_handles_and_no_pickle_goes_through_the_group():
    results = run_ranks(give_and_listen, 2)

    assert [(about, told) for about, _, told in results] == [([0, 1], False)] * 2
    # Name of a host, address of the letters, and True if all went well.
    assert max(size for _, size, _ in results) < 500


def send_pickle(rank):
    if rank == 0:
        json.dumps = lambda value: pickle.dumps(value, protocol=0).decode()
    try:
        gather(Sealed())
    except (ValueError, TypeError) as error:
        return type(error).__name__
    return None


def test_a_pickle_in_place_of_what_is_told_is_not_loaded():
    assert run_ranks(send_pickle, 1) == ["JSONDecodeError"]


def test_a_process_alone_has_no_group():
    assert not has_group()
    assert identify_host() == identify_host()
