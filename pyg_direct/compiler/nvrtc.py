"""NVRTC and nvJitLink: C++ of `cuda_src/` to LTO-IR, and LTO-IR to PTX, without a GPU.

`compile_source` makes LTO-IR by NVRTC; `link_pieces` links pieces of LTO-IR into PTX by nvJitLink. `PTX_VERSIONS`
names the architectures that code is generated for, with the PTX versions that the oldest supported drivers read.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

from pyg_direct.compiler.code_cache import read_sources, source_folder
from pyg_direct.errors import DeviceError, needs_extra


@functools.cache
def compile_source(name: str, compute_capability: tuple[int, int]) -> bytes:
    """LTO-IR of `cuda_src/<name>.cu`, kept for the process."""
    with needs_extra("a kernel that calls C++", "compile13", "compile12"):
        from cuda.bindings import nvrtc

    def call(result: tuple[Any, ...]) -> Any:
        if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"NVRTC could not compile cuda_src/{name}.cu: {result[0].name}\n{read_log()}")
        return result[1] if len(result) == 2 else None

    def read_log() -> str:
        log = b" " * nvrtc.nvrtcGetProgramLogSize(program)[1]
        nvrtc.nvrtcGetProgramLog(program, log)
        return log.decode(errors="replace")

    text = (source_folder() / f"{name}.cu").read_bytes()
    headers = read_sources(source_folder(), ".cuh")
    program = call(nvrtc.nvrtcCreateProgram(text, f"{name}.cu".encode(), len(headers), list(headers.values()),
                                            [header.encode() for header in headers]))  # fmt: skip
    architecture = "--gpu-architecture=compute_{}{}".format(*compute_capability)
    options = [architecture.encode(), b"--relocatable-device-code=true", b"-dlto", b"--std=c++17"]
    call(nvrtc.nvrtcCompileProgram(program, len(options), options))
    code = b" " * call(nvrtc.nvrtcGetLTOIRSize(program))
    call(nvrtc.nvrtcGetLTOIR(program, code))
    nvrtc.nvrtcDestroyProgram(program)
    return code


def link_pieces(pieces: Sequence[bytes], compute_capability: tuple[int, int]) -> str:
    """PTX of LTO-IR pieces linked together."""
    with needs_extra("a kernel that calls C++", "compile13", "compile12"):
        from cuda.bindings import nvjitlink

    options = ["-lto", "-ptx", "-arch=sm_{}{}".format(*compute_capability)]
    handle = nvjitlink.create(len(options), options)
    try:
        for number, piece in enumerate(pieces):
            nvjitlink.add_data(handle, nvjitlink.InputType.LTOIR, piece, len(piece), f"piece {number}")
        nvjitlink.complete(handle)
        ptx = bytearray(nvjitlink.get_linked_ptx_size(handle))
        nvjitlink.get_linked_ptx(handle, ptx)
    finally:
        nvjitlink.destroy(handle)
    return ptx.decode().rstrip("\0")


# A driver runs PTX of its GPU's architecture and of older ones. The code uses nothing newer than PTX 8.0, which every
# driver of CUDA 12 reads; but on compute capability 9.0 four numbers are added to memory at once, which drivers of CUDA
# 12.1 read; and 8.6 is the first that knows 10.0.
PTX_VERSIONS = {(7, 5): "8.0", (8, 0): "8.0", (9, 0): "8.1", (10, 0): "8.6"}


def nearest_target(compute_capability: tuple[int, int]) -> tuple[int, int]:
    """Find the newest architecture whose code a GPU of this compute capability runs."""
    older = [target for target in PTX_VERSIONS if target <= compute_capability]
    if not older:
        raise DeviceError("device must have compute capability 7.5 or more, got {}.{}".format(*compute_capability))
    return max(older)


def stamp_version(ptx: str, target: tuple[int, int]) -> str:
    """PTX with the version of its target; compilers stamp the newest they know, whatever the code uses."""
    stamped, count = re.subn(r"^\.version .*$", f".version {PTX_VERSIONS[target]}", ptx, count=1, flags=re.MULTILINE)
    assert count == 1, "PTX without a version"
    return stamped
