"""Models whose passes are replayed, beside those that run as before; without a GPU too."""

import copy
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch_geometric.nn import GAT, GCN, GIN, GraphSAGE

from pyg_direct import NeighborLoader, accelerate
from pyg_direct.datasets import synthetic_graph
from pyg_direct.nn.replay import batch_passes, guards as calls, model_call, recorded_passes
from pyg_direct.nn.replay.host_reads import HostReads

MODELS = {"sage": GraphSAGE, "gcn": GCN, "gin": GIN, "gat": GAT}


class ReadsOfModel(HostReads):
    """Reads on a CPU, without the checks of edges that a GPU does not make."""

    def _read(self, number):
        frame = sys._getframe(2)
        while "torch" in Path(frame.f_code.co_filename).parts:
            frame = frame.f_back
        is_check = "pyg_direct" in Path(frame.f_code.co_filename).parts
        return number.item() if is_check else super()._read(number)


def read_for_model(monkeypatch):
    """Let recordings on a CPU see the reads of a model alone."""
    for module in (batch_passes, recorded_passes):
        monkeypatch.setattr(module, "HostReads", ReadsOfModel)


class CallsAgain:
    """Fake of `Recorder`: recorded work runs, and runs again over the same places."""

    def __init__(self, device):
        self.device = device

    def record(self, work):
        # Nothing is computed, drawn or written.
        with calls.left_as_it_was(work.__self__._model(), self.device):
            work()
        self.work, self.is_forward = work, work.__name__ == "_run"
        return copy.copy(self)

    def replay(self):
        recording = self.work.__self__
        model, flat = recording._model(), recording._flat
        if self.is_forward:
            # A graph keeps no result of the edges before.
            recording._prepare()
            modes = [(part, part.training) for part in model.modules()]
            for part, is_training in recording._modes:
                part.training = is_training
            with (
                torch.set_grad_enabled(recording._rules.is_graded),
                torch.autocast("cpu", enabled=recording._autocast[0], dtype=recording._autocast[1]),
                recording._keeper,
                recorded_passes._own_leaves(model, recording._parameters) as leaves,
            ):
                recording._leaves = [*leaves, *recording._learning]
                self.work()
            for part, is_training in modes:
                part.training = is_training
            for out, made in zip(recording._outs, recording._made, strict=True):
                out.data.copy_(made.detach())
        else:
            self.work()
            if flat is not None:
                # As a graph does, into the memory that it was recorded with.
                recording._flat = flat.copy_(recording._flat)


def record_anywhere(device, monkeypatch):
    """Let passes over small batches be recorded, on a CPU as calls that are made again."""
    # Batches of few seeds differ more than batches of a thousand.
    monkeypatch.setattr(batch_passes, "_MARGIN", 0.15)
    if device.type == "cpu":
        monkeypatch.setattr(recorded_passes, "Recorder", CallsAgain)
        read_for_model(monkeypatch)
        monkeypatch.setattr(model_call, "_can_record", lambda device: True)
        monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)


def make_graph():
    return synthetic_graph("products", scale=0.002, device="cpu")


def make_loader(graph, device, **options):
    return NeighborLoader(graph.to_data(), [5, 4, 3], graph.train_idx, batch_size=32, seed=0, device=device, **options)


def make_model(graph, device, name="sage", **options):
    torch.manual_seed(0)
    return MODELS[name](graph.num_features, 32, 3, graph.num_classes, **options).to(device)


def run_trimmed(model, batch):
    return model(batch.x, batch.edge_index, num_sampled_nodes_per_hop=batch.num_sampled_nodes,
                 num_sampled_edges_per_hop=batch.num_sampled_edges)  # fmt: skip


def run_whole(model, batch):
    return model(batch.x, batch.edge_index)


def find_loss(model, batch, run=run_trimmed):
    return F.cross_entropy(run(model, batch)[: batch.batch_size].float(), batch.y[: batch.batch_size].long())


def find_gradients(model, batch, run=run_trimmed):
    """Return the loss and the gradients of the parameters."""
    model.zero_grad()
    loss = find_loss(model, batch, run)
    loss.backward()
    return [loss.detach(), *(part.grad for part in model.parameters() if part.grad is not None)]


def make_pair(model):
    """Return the same model, accelerated and also replayed, and its handle."""
    ordinary = copy.deepcopy(model)
    accelerate(ordinary, replay=False)
    return ordinary, model, accelerate(model, replay=True).replay


def record(model, batches):
    """Train on batches until some were replayed."""
    for batch in batches[:12]:
        find_gradients(model, batch)
    assert model._replay.replayed > 0


def pair_with_ordinary(model, device, replay="auto"):
    """(accelerated without replay, the model itself, its replay)."""
    ordinary = copy.deepcopy(model.double()).to(device)
    accelerate(ordinary, replay=False)
    return ordinary, model.to(device), accelerate(model, replay=replay).replay
