"""Every kernel and specialisation compiles for every supported architecture, on a machine without a GPU."""

import importlib
import pkgutil
import re

import pytest

import pyg_direct.kernels
from benchmarks.dynamic import ge_spmm
from pyg_direct.compiler.code_cache import COMPILER, source_folder
from pyg_direct.compiler.jit import GPU_KERNELS
from pyg_direct.compiler.nvrtc import PTX_VERSIONS, compile_source

for module in pkgutil.walk_packages(pyg_direct.kernels.__path__, "pyg_direct.kernels."):
    importlib.import_module(module.name)

# Tests declare kernels too. Kernels for comparison are in no wheel, but compile as well.
assert ge_spmm
KERNELS = [kernel for kernel in GPU_KERNELS if kernel.fn.__module__.startswith("pyg_direct.")]
SOURCES = sorted(path.stem for path in source_folder().glob("*.cu"))

# numba-cuda-mlir 0.6 takes a shared array that a function is given for one in GPU memory when it counts in it.
NOT_WITH_MLIR = {"pick_labor_gpu", "pick_labor_items_gpu"}
# It knows no `is not` of two values, which other compilers leave out with a branch.
NOT_COMPILED_BY_MLIR = {"pick_labor_gpu"}


def all_kernels(not_with_mlir=frozenset()):
    """Mark a test that takes each kernel."""
    # Kernels of a file call the same bodies, which a process compiles once; CI keeps them together.
    groups = {k: pytest.mark.xdist_group(k.fn.__module__.rpartition(".")[2]) for k in KERNELS}
    failing = not_with_mlir if COMPILER == "mlir" else ()
    return pytest.mark.parametrize("kernel", [
        pytest.param(k, id=k.name, marks=[groups[k], *([pytest.mark.xfail] if k.name in failing else [])])
        for k in KERNELS
    ])  # fmt: skip


architectures = pytest.mark.parametrize("target", PTX_VERSIONS, ids=lambda target: "sm_{}{}".format(*target))


def test_no_two_kernels_share_a_name():
    names = [kernel.name for kernel in KERNELS]

    assert len(names) == len(set(names)), "compiled code is kept by name"


def compile_kernel(kernel, target):
    """(choice of dtypes, code) of every specialisation for an architecture."""
    choices, targets = list(kernel.specialisations()), list(PTX_VERSIONS)
    if COMPILER == "mlir":
        # It differs from numba by the kernel, hardly by the dtype, and compiles for seconds.
        choices, targets = choices[-1:], [target]
    # The other architectures are tested too, and take less time together.
    place = targets.index(target)
    return [(choice, kernel.compile_all(targets, choice)[place]) for choice in choices]


def find_functions(ptx):
    """Return (names of entries, of functions with a body, of functions declared in other files, of functions
    called).
    """
    entries = re.findall(r"\.entry\s+([\w$]+)", ptx)
    declared = re.findall(r"\.extern\s+\.func\s+(?:\([^)]*\)\s*)?([\w$]+)", ptx)
    defined = set(re.findall(r"\.func\s+(?:\([^)]*\)\s*)?([\w$]+)", ptx)) - set(declared)
    called = re.findall(r"\bcall(?:\.uni)?\s+(?:\([^)]*\)\s*,\s*)?([\w$]+)", ptx)
    return entries, defined, set(declared), set(called)


def assemble(ptx, target):
    """Size of the machine code that the driver's assembler makes of a kernel."""
    from cuda.bindings import nvjitlink

    handle = nvjitlink.create(1, ["-arch=sm_{}{}".format(*target)])
    try:
        nvjitlink.add_data(handle, nvjitlink.InputType.PTX, ptx.encode(), len(ptx), "kernel.ptx")
        nvjitlink.complete(handle)
        return nvjitlink.get_linked_cubin_size(handle)
    finally:
        nvjitlink.destroy(handle)


@architectures
@all_kernels(NOT_COMPILED_BY_MLIR)
@pytest.mark.full
def test_compiles_to_one_entry_without_loose_ends(kernel, target):
    for choice, code in compile_kernel(kernel, target):
        entries, defined, declared, called = find_functions(code.ptx)
        assert entries == [code.entry], choice
        # With a suffix, such as sm_90a, it would run only on this architecture.
        assert re.findall(r"^\.target (\w+)", code.ptx, re.MULTILINE) == ["sm_{}{}".format(*target)], choice
        assert called <= defined, f"{choice}: calls {called - defined}"
        assert not declared, f"{choice}: nobody defines {declared}"


def read_instructions(ptx):
    """PTX without comments, version and architecture."""
    return re.sub(r"^(//|\.version |\.target ).*\n", "", ptx, flags=re.MULTILINE)


def list_forms(ptx):
    """Return the instructions of PTX without their operands, such as `ld.global.v4.f32`."""
    return set(re.findall(r"^\s*(?:@!?%p\d+ )?([a-z][\w.:]*)\s", ptx, flags=re.MULTILINE))


@architectures
@all_kernels(NOT_WITH_MLIR)
@pytest.mark.full
def test_assembles_at_the_ptx_version_of_the_oldest_driver(kernel, target):
    # What an architecture has, later ones have too, and an instruction is known by its form. So code is assembled if it
    # has forms of its own, and one code that differs from those of older architectures in any case.
    older = [] if COMPILER == "mlir" else [one for one in PTX_VERSIONS if one < target]
    before = [code.ptx for one in older for _, code in compile_kernel(kernel, one)]
    texts, forms = {read_instructions(ptx) for ptx in before}, set().union(*map(list_forms, before))
    is_first = True

    for choice, code in compile_kernel(kernel, target):
        assert f"\n.version {PTX_VERSIONS[target]}\n" in code.ptx, choice
        if read_instructions(code.ptx) not in texts and (is_first or not list_forms(code.ptx) <= forms):
            assert assemble(code.ptx, target) > 0, choice
            is_first = False
        forms |= list_forms(code.ptx)


def test_a_small_kernel_assembles_for_every_architecture():
    kernel = next(kernel for kernel in KERNELS if kernel.name == "find_offsets_gpu")

    for target in PTX_VERSIONS:
        assert all(assemble(code.ptx, target) > 0 for _, code in compile_kernel(kernel, target)), target


def test_code_beyond_its_ptx_version_does_not_assemble():
    ptx = ".version 8.0\n.target sm_100\n.address_size 64\n.visible .entry name() { ret; }"

    with pytest.raises(Exception, match="PTX"):
        assemble(ptx, (10, 0))


@pytest.mark.parametrize("name", SOURCES)
@architectures
def test_c_plus_plus_compiles(name, target):
    code = compile_source(name, target)

    assert len(code) > 0


def test_every_source_belongs_to_a_kernel():
    used = {name for kernel in KERNELS for name in kernel.sources}

    assert sorted(used) == SOURCES


def test_loose_ends_are_found():
    ptx = """
.extern .func  (.param .b32 func_retval0) missing
(
    .param .b64 missing_param_0
)
;
.visible .entry kernel(
)
{
    call.uni (retval0),
    missing,
    (param0);
}
"""

    assert find_functions(ptx) == (["kernel"], set(), {"missing"}, {"missing"})
