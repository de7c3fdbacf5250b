"""GPU kernels with their functions of `cuda_src/` on a CPU, where numba-cuda's simulator has no such functions.

g++ compiles the C++ with stand-ins for what CUDA adds, and Python runs the frame of each kernel, a thread for each lane
of a group. Lanes of a group meet at its shuffles; groups come one after the other.
"""

from __future__ import annotations

import ctypes
import functools
import re
import subprocess
import threading
from types import FunctionType, SimpleNamespace

import numpy as np
import torch

from pyg_direct.compiler.code_cache import source_folder
from pyg_direct.compiler.jit import DeviceFunction

_CUDA = r"""
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <pthread.h>
#include <vector>
#define __device__
#define __forceinline__ inline
// Memory of a block is memory of the threads that run at one time.
#define __shared__ static
#define __align__(bytes)
#define __expf exp_of
#define BITS(To, from) ({ To to_; memcpy(&to_, &from, sizeof(to_)); to_; })
using std::max;
using std::min;
struct uint4 { unsigned x, y, z, w; };
struct float4 { float x, y, z, w; };
struct uint2 { unsigned x, y; };
static const struct { int x; } threadIdx = {0};
// Copies come as late as they may: when their group is waited for.
static thread_local std::vector<std::vector<std::function<void()>>> groups_(1);
template <class T> static inline void defer(T *to, const T *from) { groups_.back().push_back([=] { *to = *from; }); }
static inline void wait_for(int groups)
{
    for (; (int)groups_.size() > groups + 1; groups_.erase(groups_.begin()))
        for (auto &copy : groups_.front()) copy();
}
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline void *__cvta_global_to_generic(unsigned long long address) { return (void *)address; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline float __uint_as_float(unsigned bits) { return BITS(float, bits); }
static inline unsigned __float_as_uint(float value) { return BITS(unsigned, value); }
static inline float exp_of(float value) { return std::exp(value); }
static inline void atomicAdd(float *to, float value) { *to += value; }
struct Lanes { pthread_barrier_t barrier; unsigned value[32]; };
static thread_local Lanes *lanes_;
static thread_local int lane_;
extern "C" void *make_lanes(int count)
{
    Lanes *lanes = new Lanes;
    pthread_barrier_init(&lanes->barrier, nullptr, count);
    return lanes;
}
extern "C" void enter(void *lanes, int lane) { lanes_ = (Lanes *)lanes, lane_ = lane; }
static inline void __syncwarp(unsigned) { pthread_barrier_wait(&lanes_->barrier); }
template <class T> static inline T exchange(T value, int lane)
{
    lanes_->value[lane_] = BITS(unsigned, value);
    pthread_barrier_wait(&lanes_->barrier);
    const unsigned other = lanes_->value[lane];
    pthread_barrier_wait(&lanes_->barrier);
    return BITS(T, other);
}
template <class T> static inline T __shfl_xor_sync(unsigned, T value, int step)
{
    return exchange(value, lane_ ^ step);
}
template <class T> static inline T __shfl_sync(unsigned, T value, int lane, int width = 32)
{
    return exchange(value, (lane_ & -width) + (lane & (width - 1)));
}
static inline unsigned __ballot_sync(unsigned, bool value)
{
    unsigned all = 0;
    lanes_->value[lane_] = value;
    pthread_barrier_wait(&lanes_->barrier);
    for (int lane = 0; lane < 32; ++lane) all |= lanes_->value[lane] << lane;
    pthread_barrier_wait(&lanes_->barrier);
    return all;
}
static inline int __ffs(unsigned bits) { return __builtin_ffs(bits); }
"""
# PTX in C++ and what GPUs without it do, and the same for a CPU.
_PTX = {
    r'asm\("cvt\.f32\.f16 [^;]*;"[^;]*;': "unsigned short half = bits; value = (float)BITS(_Float16, half);",
    r'asm\("cvt\.rn\.f16\.f32 [^;]*;"[^;]*;': "_Float16 half = (_Float16)value; bits = BITS(unsigned short, half);",
    r"\{ \*to = \*from; \}": "{ defer(to, from); }",
    r"end_copies\(\) \{\}": "end_copies() { groups_.emplace_back(); }",
    r"wait_for_copies\(\) \{\}": "wait_for_copies() { wait_for(groups); }",
}
_TYPES = {
    "u8": ctypes.c_uint64,
    "i8": ctypes.c_int64,
    "i4": ctypes.c_int32,
    "u4": ctypes.c_uint32,
    "f4": ctypes.c_float,
}
_SCALARS = {"u8": np.uint64, "i8": np.int64, "i4": np.int32, "f4": np.float32}
_HEADERS = "items.cuh", "attention.cuh", "ahead.cuh"
# The size of blocks is of no matter here.
_THREADS = 256
_thread = threading.local()


def load(names, folder):
    """Compile sources of `cuda_src/` with g++ into a library."""
    headers = "".join((source_folder() / name).read_text().replace("#pragma once", "") for name in _HEADERS)
    for ptx, plain in _PTX.items():
        headers = re.sub(ptx, plain, headers)
    parts = [f"namespace of_{name} {{\n{(source_folder() / f'{name}.cu').read_text()}\n}}" for name in names]
    text = _CUDA + headers + "\n".join(re.sub(r'#include "\w+\.cuh"', "", part) for part in parts)
    (folder / "all.cpp").write_text(text)
    command = "g++ -std=c++20 -O1 -shared -fPIC -w -o all.so all.cpp -lpthread"
    subprocess.run(command.split(), cwd=folder, check=True, timeout=300)
    library = ctypes.CDLL(str(folder / "all.so"))
    library.make_lanes.restype = ctypes.c_void_p
    return library


class _Cuda:
    """Numbers of the thread, and atomics of one thread."""

    threadIdx = property(lambda self: SimpleNamespace(x=_thread.number % _THREADS))  # noqa: N815
    blockIdx = property(lambda self: SimpleNamespace(x=_thread.number // _THREADS))  # noqa: N815
    gridDim = SimpleNamespace(x=1)  # noqa: N815
    atomic = SimpleNamespace(add=lambda array, at, value: _add(array, at, value))


def _add(array, at, value):
    before = array[at].copy()
    array[at] += value
    return before


def run(library, kernel, args, groups=None, lanes=1):
    """Run a kernel for `groups` groups of so many consecutive threads; for None one block, whose threads loop."""
    fn = FunctionType(kernel.fn.__code__, _bind(library, kernel.fn))
    values = [arg.view(-1).numpy() if isinstance(arg, torch.Tensor) else _SCALARS[code](arg)
              for arg, code in zip(args, kernel.signature, strict=True)]  # fmt: skip
    place, errors = ctypes.c_void_p(library.make_lanes(lanes)), []

    def run_thread(number, lane):
        library.enter(place, lane)
        _thread.number = number
        try:
            with np.errstate(over="ignore"):
                fn(*values)
        except Exception as error:
            errors.append(error)

    for group in range(_THREADS if groups is None else groups):
        threads = [threading.Thread(target=run_thread, args=(group * lanes + lane, lane)) for lane in range(1, lanes)]
        for thread in threads:
            thread.start()
        run_thread(group * lanes, 0)
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


def _bind(library, fn):
    """Return the globals of a kernel, with functions of C++ in place of their declarations."""
    bound = {**fn.__globals__, "cuda": _Cuda(), "THREADS": _THREADS}
    for name, value in fn.__globals__.items():
        if isinstance(value, DeviceFunction):
            codes = value.signature.split()
        elif (signature := getattr(value, "sig", None)) is not None:
            # A test that compiled kernels in this process has declared the function to the compiler.
            codes = [np.dtype(str(kind)).str[1:] for kind in signature.args]
        else:
            continue
        bound[name] = _SMALL.get(value.name) or functools.partial(_call, library, value.name, codes)
    return bound


def _call(library, name, codes, *args):
    given = [_TYPES[code](float(arg) if code == "f4" else int(arg)) for arg, code in zip(args, codes, strict=True)]
    assert getattr(library, name)(None, *given) == 0


def _store_narrowed(to, at, value, kind):
    bits = torch.tensor(float(value)).to(torch.float16 if kind == 1 else torch.bfloat16).view(torch.int16).item()
    ctypes.c_int16.from_address(int(to) + 2 * int(at)).value = bits


# Functions that return a number, or that are too small to compile a file for.
_SMALL = {"quotient": lambda number, divisor: np.int32(int(number) // int(divisor)), "store_narrowed": _store_narrowed}
