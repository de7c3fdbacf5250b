"""What is made on the stream of an exchange comes behind what its caller does, and stays as long as that needs it."""

from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import Mock

import torch
from torch_geometric.sampler import EdgeSamplerInput, NegativeSampling

from pyg_direct.distributed.dist_neighbor_sampler import DistNeighborSampler
from pyg_direct.distributed.server.client_graph import ClientGraph, _Alone
from pyg_direct.loader.prefetch.lockstep_ranks import Steps
from pyg_direct.sampler.keyed_sampler import Drawn
from tests.distributed.server.client_graph.test_client import ServersHere


def test_what_a_sample_says_of_its_links_is_held_too(folder, monkeypatch):
    held = []
    monkeypatch.setattr(Drawn, "record_stream", lambda drawn, stream: held.extend(drawn.tensors()))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    sampler = DistNeighborSampler(ClientGraph(ServersHere(folder), device="cpu"), [3, 2], disjoint=True)
    out = sampler.sample_from_edges(EdgeSamplerInput(None, torch.arange(5), torch.arange(5, 10)),
                                    NegativeSampling("binary"))  # fmt: skip
    sampler.device = torch.device("cuda", 0)

    sampler._hold(out)

    found = [out.node, out.row, out.col, out.edge, out.batch, *out.metadata[1:3]]
    assert all(any(one is other for other in held) for one in found)


def test_a_client_works_on_its_gpu_behind_its_caller(monkeypatch):
    log = []

    class Stream:
        def __init__(self, device):
            self.device = device

        def record_event(self):
            log.append("record")
            return SimpleNamespace(wait=lambda: log.append("wait"))

        def synchronize(self):
            log.append("synchronize")

    @contextmanager
    def enter(what):
        log.append(what if isinstance(what, torch.device) else "stream")
        yield

    for name, value in (("Stream", Stream), ("current_stream", Stream), ("device", enter), ("stream", enter),
                        ("is_current_stream_capturing", lambda: False)):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    alone = _Alone(torch.device("cuda", 1), 0, 1)

    def work():
        log.append("work")
        # Its turn is now.
        return alone.run(lambda: 7)

    assert alone.run(work) == 7
    assert log == ["record", torch.device("cuda", 1), "stream", "wait", "work", "synchronize"]


def test_batches_are_waited_for_on_their_own_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"stream of {device}")
    event, done = Mock(), Future()
    done.set_result(([SimpleNamespace(stores=[])], event, 0))
    communicator = Mock(device=torch.device("cuda", 1), submit=lambda *work: done)

    next(Steps(communicator, iter([(0, None)]), Mock(), Mock(), 0))

    event.wait.assert_called_once_with("stream of cuda:1")
