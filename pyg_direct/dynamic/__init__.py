"""Discrete-time dynamic graphs: sequences of snapshots, several aggregated at a time (PiPAD, PPoPP 2023).

- `snapshot.py`: one snapshot's edges in order.
- `matrix_group.py`, `device_caches.py`: matrices of groups of snapshots, and caches on the device.
- `snapshot_plan.py`: matrices and first aggregation of a sequence, and group sizes.
- `frame_trainer.py`, `frame_plan.py`: training over sliding windows, replayed as a CUDA graph.
- `stream.py`, `overlapped_work.py`: snapshots from their sources in an unchanged training loop, and work in
  parallel with it.
- `nn/`: recurrent layers, and acceleration of PyG's convolutions and of PyG Temporal's layers.
"""

from pyg_direct.dynamic.frame_trainer import FrameTrainer
from pyg_direct.dynamic.nn.accelerate_snapshots import accelerate, patch, unpatch
from pyg_direct.dynamic.stream import SnapshotStream, discretize, stream

__all__ = ["FrameTrainer", "SnapshotStream", "accelerate", "discretize", "patch", "stream", "unpatch"]
