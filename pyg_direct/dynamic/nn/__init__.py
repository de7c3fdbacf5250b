"""Recurrent graph layers with the constructors, parameters and results of PyTorch Geometric Temporal's.

- `t_gcn.py` (T-GCN, A3T-GCN), `chebyshev.py`, `dcrnn.py`, `evolve_gcn.py`, `mpnn_lstm.py`: the layers.
- `sparse_conv.py`, `recurrent_step.py`: the sparse half of a convolution, and single steps of recurrent layers.
- `accelerate_snapshots.py`: PyG's own convolutions through the plan of a snapshot, and replaced layers of PyG Temporal.
"""

from pyg_direct.dynamic.nn.chebyshev import GCLSTM, GConvGRU
from pyg_direct.dynamic.nn.dcrnn import DCRNN
from pyg_direct.dynamic.nn.evolve_gcn import EvolveGCNH, EvolveGCNO
from pyg_direct.dynamic.nn.mpnn_lstm import MPNNLSTM
from pyg_direct.dynamic.nn.t_gcn import A3TGCN, TGCN

__all__ = ["A3TGCN", "DCRNN", "GCLSTM", "MPNNLSTM", "TGCN", "EvolveGCNH", "EvolveGCNO", "GConvGRU"]
