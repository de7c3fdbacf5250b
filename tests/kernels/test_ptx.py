"""Every kernel and specialisation compiles for every supported architecture, on a machine without a GPU."""

import importlib
import pkgutil
import re

import pytest

import pyg_direct.kernels
from pyg_direct.kernels.jit import GPU_KERNELS, compile_source, source_folder
from pyg_direct.runtime.launch import fit_ptx_version

for module in pkgutil.iter_modules(pyg_direct.kernels.__path__):
    importlib.import_module(f"pyg_direct.kernels.{module.name}")

# Tests declare kernels too.
KERNELS = [kernel for kernel in GPU_KERNELS if kernel.fn.__module__.startswith("pyg_direct.")]
SOURCES = sorted(path.stem for path in source_folder().glob("*.cu"))
ARCHITECTURES = [(7, 5), (8, 0), (9, 0), (10, 0)]
# As cuDriverGetVersion numbers it.
OLDEST_DRIVER = 12000

kernels = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)


def architectures(chosen):
    return pytest.mark.parametrize("capability", chosen, ids=lambda capability: "sm_{}{}".format(*capability))


def find_functions(ptx):
    """(names of entries, of functions with a body, of functions declared elsewhere, of functions called)."""
    entries = re.findall(r"\.entry\s+([\w$]+)", ptx)
    declared = re.findall(r"\.extern\s+\.func\s+(?:\([^)]*\)\s*)?([\w$]+)", ptx)
    defined = set(re.findall(r"\.func\s+(?:\([^)]*\)\s*)?([\w$]+)", ptx)) - set(declared)
    called = re.findall(r"\bcall(?:\.uni)?\s+(?:\([^)]*\)\s*,\s*)?([\w$]+)", ptx)
    return entries, defined, set(declared), set(called)


def link(code, capability, driver_version):
    """Size of the machine code that nvJitLink makes of a kernel, as a driver of that version would."""
    from cuda.bindings import nvjitlink

    handle = nvjitlink.create(1, ["-arch=sm_{}{}".format(*capability)])
    try:
        for number, ptx in enumerate((code.ptx, *code.linked)):
            data = fit_ptx_version(ptx, driver_version).encode()
            nvjitlink.add_data(handle, nvjitlink.InputType.PTX, data, len(data), f"{number}.ptx")
        nvjitlink.complete(handle)
        return nvjitlink.get_linked_cubin_size(handle)
    finally:
        nvjitlink.destroy(handle)


@kernels
@architectures(ARCHITECTURES)
def test_compiles_to_one_entry_without_loose_ends(kernel, capability):
    for choice in kernel.specialisations():
        code = kernel.compile(capability, choice)

        entries, defined, declared, called = find_functions(code.ptx)
        linked = {name for ptx in code.linked for name in find_functions(ptx)[1]}
        assert entries == [code.entry], choice
        assert f".target sm_{capability[0]}{capability[1]}" in code.ptx, choice
        assert called <= defined | declared, f"{choice}: calls {called - defined - declared}"
        assert declared <= linked, f"{choice}: no source defines {declared - linked}"


@pytest.mark.parametrize("name", SOURCES)
@architectures(ARCHITECTURES)
def test_c_plus_plus_compiles_without_loose_ends(name, capability):
    ptx = compile_source(name, capability)

    entries, defined, declared, _ = find_functions(ptx)
    assert f".target sm_{capability[0]}{capability[1]}" in ptx
    assert entries == []
    assert defined
    assert not declared


def test_every_source_belongs_to_a_kernel():
    used = {name for kernel in KERNELS for name in kernel.sources}

    assert sorted(used) == SOURCES


@kernels
def test_links_at_the_ptx_version_of_the_oldest_driver(kernel):
    code = kernel.compile((7, 5), next(kernel.specialisations()))

    num_bytes = link(code, (7, 5), OLDEST_DRIVER)

    assert num_bytes > 0
