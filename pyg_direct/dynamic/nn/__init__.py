"""Recurrent graph layers with the constructors, parameters and results of PyTorch Geometric Temporal's."""

from pyg_direct.dynamic.nn.attention import A3TGCN
from pyg_direct.dynamic.nn.chebyshev import GCLSTM, GConvGRU
from pyg_direct.dynamic.nn.diffusion import DCRNN
from pyg_direct.dynamic.nn.evolve import EvolveGCNH, EvolveGCNO
from pyg_direct.dynamic.nn.mpnn import MPNNLSTM
from pyg_direct.dynamic.nn.tgcn import TGCN

__all__ = ["A3TGCN", "DCRNN", "GCLSTM", "MPNNLSTM", "TGCN", "EvolveGCNH", "EvolveGCNO", "GConvGRU"]
