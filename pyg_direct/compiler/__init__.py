"""Compilers of kernels and the caches of compiled code.

- `jit.py`: the module that imports Numba and numba-cuda.
- `link_once.py`: Numba's work on a CPU loop, without parts unused by the loop.
- `nvrtc.py`: compilation of `cuda_src/` by NVRTC and nvJitLink, and the target architectures.
- `code_cache.py`: compiled code on disk, and the PTX archive of the wheel.
- `shipped_loops.py`: the archive of compiled CPU loops in the wheel.
- `openmp.py`: the OpenMP threads under Numba's loops.
"""
