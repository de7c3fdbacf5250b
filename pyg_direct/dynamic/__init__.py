"""Discrete-time dynamic graphs: sequences of snapshots, aggregated several at a time (PiPAD, PPoPP 2023)."""

from pyg_direct.dynamic.nn.plain import accelerate
from pyg_direct.dynamic.sequence import discretize
from pyg_direct.dynamic.stream import SnapshotStream, stream
from pyg_direct.dynamic.swap import patch, unpatch
from pyg_direct.dynamic.trainer import FrameTrainer

__all__ = ["FrameTrainer", "SnapshotStream", "accelerate", "discretize", "patch", "stream", "unpatch"]
