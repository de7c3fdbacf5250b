"""Fake of `Recorder` without a GPU: torch's operations are recorded, and computed again over the same memory.

Unlike Python that runs again it is as blind as a CUDA graph to all that is not in that memory. Our own loops of the CPU
are not seen, so that models are replayed with PyG's.
"""

import gc

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pyg_direct.nn.replay import guards, model_call, recorded_passes
from tests.nn.replays import read_for_model


class _Tape(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, out))
        return out


class _Graph:
    def __init__(self, calls):
        self.calls = calls

    @torch.no_grad()
    def replay(self):
        for function, args, kwargs, out in self.calls:
            for old, new in zip(tree_leaves(out), tree_leaves(function(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.numel() and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class TapeRecorder:
    """Fake with the attributes of `Recorder`."""

    def __init__(self, device):
        assert device.type == "cpu"

    def record(self, work):
        # A process of tests has many old objects, and scanning them takes longer than a case.
        gc.collect(1)
        with _Tape() as tape:
            work()
        return _Graph(tape.calls)


def record_on_tapes(monkeypatch, note=lambda work, made: None):
    """Let passes be recorded on tapes without a GPU; `note` gets the work and the tape of each recording."""

    class Recorder(TapeRecorder):
        def record(self, work):
            with guards.left_as_it_was(work.__self__._model(), torch.device("cpu")):
                made = super().record(work)
            note(work, made)
            return made

    monkeypatch.setattr(recorded_passes, "Recorder", Recorder)
    read_for_model(monkeypatch)
    monkeypatch.setattr(model_call, "_can_record", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
