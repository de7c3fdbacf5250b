"""Steps of a temporal graph network on events of JODIE Wikipedia's shape, with our classes and with PyG's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torch_geometric.data import TemporalData
from torch_geometric.loader import TemporalDataLoader as PygTemporalDataLoader
from torch_geometric.nn import TransformerConv
from torch_geometric.nn.models import tgn as pyg_tgn

from pyg_direct.bench.limits import wait_for_gpu
from pyg_direct.bench.result_row import Row
from pyg_direct.loader.temporal_dataloader import TemporalDataLoader
from pyg_direct.loader.tgn import LastNeighborLoader, TGNMemory
from pyg_direct.runtime.cuda.device import resolve_device

OURS = SimpleNamespace(loader=TemporalDataLoader, neighbors=LastNeighborLoader, memory=TGNMemory)
PYGS = SimpleNamespace(loader=PygTemporalDataLoader, neighbors=pyg_tgn.LastNeighborLoader, memory=pyg_tgn.TGNMemory)
_BATCH, _SIZE, _WIDTH = 200, 10, 100
# Steps before those that count: compilation, and the first events, which have few neighbors.
_WARM = 20


def make_events(num_events: int, num_users: int, num_items: int, width: int) -> TemporalData:
    """Make events of users that return to a few items, on the CPU.

    Args:
        num_events, num_users, num_items: Sizes.
        width: Values of a message.
    """
    generator = torch.Generator().manual_seed(0)
    user = (num_users * torch.rand(num_events, generator=generator).pow(2)).long()
    known = torch.randint(num_items, (num_users, 3), generator=generator)
    item = known[user, torch.randint(3, (num_events,), generator=generator)]
    item[::5] = torch.randint(num_items, (len(item[::5]),), generator=generator)
    return TemporalData(src=user, dst=num_users + item, t=torch.arange(num_events) * 17,
                        msg=torch.randn(num_events, width, generator=generator))  # fmt: skip


class _Model(torch.nn.Module):
    """Attention over the latest neighbors, and a score of each link."""

    def __init__(self, time_enc: Any, width: int) -> None:
        super().__init__()
        self.time_enc = time_enc
        self.conv = TransformerConv(_WIDTH, _WIDTH // 2, heads=2, dropout=0.1, edge_dim=width + _WIDTH)
        self.score = torch.nn.Linear(2 * _WIDTH, 1)

    def forward(self, z: Tensor, elapsed: Tensor, edge_index: Tensor, msg: Tensor, links: Tensor) -> Tensor:
        """Return the score of each link, float32 `[L]`."""
        edge_attr = torch.cat([self.time_enc(elapsed.to(z.dtype)), msg], -1)
        z = self.conv(z, edge_index, edge_attr)
        out: Tensor = self.score(torch.cat([z[links[0]], z[links[1]]], 1))
        return out.view(-1)


class _Training:
    """Training with one package's classes."""

    def __init__(self, kinds: Any, events: TemporalData, device: torch.device) -> None:
        torch.manual_seed(0)
        self.events, width = events.to(device), events.msg.shape[1]
        more = {"device": device} if kinds is OURS else {}
        self.loader = kinds.loader(self.events, batch_size=_BATCH, neg_sampling_ratio=1.0, **more)
        self.neighbors = kinds.neighbors(events.num_nodes, _SIZE, device=device)
        message = pyg_tgn.IdentityMessage(width, _WIDTH, _WIDTH)
        self.memory = kinds.memory(events.num_nodes, width, _WIDTH, _WIDTH, message, pyg_tgn.LastAggregator())
        self.model = _Model(self.memory.time_enc, width)
        self.parameters = list({*self.memory.to(device).parameters(), *self.model.to(device).parameters()})
        # As `pyg_direct run` does for Adam.
        self.optimizer = torch.optim.Adam(self.parameters, lr=1e-4, fused=kinds is OURS and device.type == "cuda")
        self.place = torch.empty(events.num_nodes, dtype=torch.long, device=device)

    def run(self, steps: int) -> Iterator[dict[str, float]]:
        """Train from the first event on; yield milliseconds of each part of a step."""
        self.memory.reset_state()
        self.neighbors.reset_state()
        times: dict[str, float] = {}
        last = time.perf_counter()

        def note(name: str) -> None:
            nonlocal last
            wait_for_gpu()
            now = time.perf_counter()
            times[name] = times.get(name, 0.0) + 1e3 * (now - last)
            last = now

        for batch in islice(self.loader, steps):
            note("batch")
            n_id, edge_index, e_id = self.neighbors(batch.n_id)
            note("neighbors")
            z, last_update = self.memory(n_id)
            note("memory")
            self.place[n_id] = torch.arange(len(n_id), device=n_id.device)
            ends = torch.stack([batch.src.repeat(2), torch.cat([batch.dst, batch.neg_dst])])
            elapsed = last_update[edge_index[0]] - self.events.t[e_id]
            scores = self.model(z, elapsed, edge_index, self.events.msg[e_id], self.place[ends])
            is_event = (torch.arange(len(scores), device=scores.device) < len(batch.src)).float()
            loss = binary_cross_entropy_with_logits(scores, is_event)
            note("model, forward")
            self.memory.update_state(batch.src, batch.dst, batch.t, batch.msg)
            note("update of the memory")
            self.neighbors.insert(batch.src, batch.dst)
            note("insertion")
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.memory.detach()
            note("backward and optimizer")
            yield {**times, "step": sum(times.values())}
            times.clear()
            last = time.perf_counter()


def measure_continuous_time(scale: float, steps: int = 200) -> Iterator[Row]:
    """Measure milliseconds of a training step of a temporal graph network, by parts, ours and PyG's.

    Args:
        scale: Share of the events of JODIE's Wikipedia.
        steps: Batches of 200 events.
    """
    device = resolve_device(None)
    events = make_events(max(4 * _BATCH, int(157_474 * scale)), max(8, int(8_227 * scale)), max(4, int(1_000 * scale)),
                         172)  # fmt: skip
    found = {}
    for name, kinds in (("pyg_direct", OURS), ("PyG", PYGS)):
        noted = list(_Training(kinds, events, device).run(_WARM + steps))
        # A short run has no steps to leave out.
        found[name] = noted[min(_WARM, len(noted) // 2) :]
    case = f"continuous time/{device.type}/{len(events):,} events"
    for name, noted in found.items():
        for part in noted[0]:
            yield Row.of(case, f"{part}, {name}", "ms", [times[part] for times in noted])
    ratios = [theirs["step"] / ours["step"] for ours, theirs in zip(found["pyg_direct"], found["PyG"], strict=True)]
    yield Row.of(case, "step, PyG over pyg_direct", "x", ratios)
