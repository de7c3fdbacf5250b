"""Targets of cuBLAS for matrix products."""

import ctypes

import torch

from pyg_direct.runtime.cuda import graph_capture


def read_target():
    """Multiprocessors that products of the calling thread are made for, 0 for all."""
    target = ctypes.c_int(-1)
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
    assert graph_capture._find_cublas().cublasGetSmCountTarget(handle, ctypes.byref(target)) == 0
    return target.value
