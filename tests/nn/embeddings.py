"""Embeddings in every kind of memory; on a CPU, ordinary memory stands for the host's and hot rows lie beside it."""

import pytest
import torch

from pyg_direct import NodeEmbedding
from pyg_direct.features import trained_rows
from pyg_direct.features.trained_rows import HotRows
from pyg_direct.nn import node_embedding
from pyg_direct.runtime.cuda.memory import allocate

# (placement, device_cache_size)
PLACES = {"near": ("auto", 0), "host": ("unified", 0), "host, some hot": ("unified", "20%"),
          "page-locked, some hot": ("pinned", "20%"), "host, all hot": ("unified", "100%")}  # fmt: skip


def _allocate_on_cpu(shape, dtype, placement, device):
    block = allocate(shape.numel() * dtype.itemsize, "cpu")
    block.placement = placement
    return block.view_on_cpu(dtype, shape).zero_(), block


def _choose_on_cpu(table, asked, hotness, csr_topo):
    count = len(table) * int(str(asked).removesuffix("%")) // 100
    return HotRows.of(torch.arange(count), len(table), 0.5)


@pytest.fixture(params=PLACES)
def place(request, real_device, monkeypatch):
    """Options of an embedding, for one of the places that its rows may have."""
    placement, cache = PLACES[request.param]
    if real_device.type == "cpu" and placement != "auto":
        monkeypatch.setattr(node_embedding, "place_trained", _allocate_on_cpu)
        monkeypatch.setattr(trained_rows, "allocate_rows", _allocate_on_cpu)
        monkeypatch.setattr(node_embedding, "choose_hot_rows", _choose_on_cpu)
        monkeypatch.setattr("pyg_direct.runtime.cuda.memory.Block.check_process", lambda self: None)
    return {"device": real_device, "placement": placement, "device_cache_size": cache}


def make_pair(place, num_rows=40, width=5, dtype=torch.float32):
    """An embedding of torch and ours, with equal rows."""
    theirs = torch.nn.Embedding(num_rows, width, sparse=True, device=place["device"], dtype=dtype)
    return theirs, NodeEmbedding.from_pretrained(theirs.weight.detach(), freeze=False, **place)
