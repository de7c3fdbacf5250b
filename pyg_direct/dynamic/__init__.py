"""Discrete-time dynamic graphs: sequences of snapshots, aggregated several at a time (PiPAD, PPoPP 2023)."""

from pyg_direct.dynamic.sequence import discretize
from pyg_direct.dynamic.stream import SnapshotStream, stream

__all__ = ["SnapshotStream", "discretize", "stream"]
