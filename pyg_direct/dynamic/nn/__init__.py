"""Recurrent graph layers with the constructors, parameters and results of PyTorch Geometric Temporal's.

- `gated_units.py` (T-GCN, A3T-GCN, DCRNN, GCLSTM, GConvGRU), `evolve_gcn.py`, `mpnn_lstm.py`: the layers.
- `sparse_conv.py`, `recurrent_step.py`: the sparse half of a convolution, and single steps of recurrent layers.
- `accelerate_snapshots.py`: PyG's own convolutions through the plan of a snapshot, and replaced layers of PyG Temporal.
"""

from pyg_direct.dynamic.nn.evolve_gcn import EvolveGCNH, EvolveGCNO
from pyg_direct.dynamic.nn.gated_units import A3TGCN, DCRNN, GCLSTM, TGCN, GConvGRU
from pyg_direct.dynamic.nn.mpnn_lstm import MPNNLSTM

__all__ = ["A3TGCN", "DCRNN", "GCLSTM", "MPNNLSTM", "TGCN", "EvolveGCNH", "EvolveGCNO", "GConvGRU"]
