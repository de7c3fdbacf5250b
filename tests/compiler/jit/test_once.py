"""What is done once gives what is done again."""

import re
from types import SimpleNamespace

import pytest

from pyg_direct.compiler import jit
from pyg_direct.compiler.jit import compile_steps_once, lower_once
from pyg_direct.compiler.link_once import replaced
from pyg_direct.compiler.nvrtc import PTX_VERSIONS, stamp_version
from pyg_direct.kernels.local_ids.csr import find_offsets_gpu


def number_names(ptx):
    """PTX with mangled names, which tell the architecture and how many were made before, replaced by their order."""
    names = {}
    return re.sub(r"_ZN[\w$]+", lambda name: names.setdefault(name[0], f"name{len(names)}"), ptx)


def test_architectures_compiled_together_have_the_code_of_each_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(jit, "cache_folder", lambda kind: tmp_path)
    choice = next(find_offsets_gpu.specialisations())

    together = find_offsets_gpu.compile_all(list(PTX_VERSIONS), choice)

    alone = [stamp_version(find_offsets_gpu.compile_ptx(target, choice), target) for target in PTX_VERSIONS]
    assert [number_names(code.ptx) for code in together] == [number_names(ptx) for ptx in alone]
    assert len(set(alone)) == len(PTX_VERSIONS)


def test_a_kernel_is_lowered_once_for_architectures_in_a_row():
    calls = []
    lower = lower_once(lambda *args, **options: calls.append((args, options)) or len(calls), (7, 5))

    given = [lower("kernel", "sig", cc=target, lto=lto) for lto in (False, True) for target in PTX_VERSIONS]

    assert given == [1] * 4 + [2] * 4
    assert calls == [(("kernel", "sig"), {"lto": lto, "cc": (7, 5)}) for lto in (False, True)]


def test_a_step_is_compiled_once_for_an_architecture_and_a_name():
    taken = []
    step = SimpleNamespace(py_func=object(), targetoptions={"device": True})
    step._compile_device_callee = lambda sig, abi_name: taken.append(abi_name) or (sig, abi_name)

    def compile_machine_code(dispatcher, sig, abi_info, output):
        return "machine code"

    calls = [compile_steps_once(compile_machine_code, target) for target in ((7, 5), (7, 5), (9, 0))]

    assert [call(step, ("i8",), {"abi_name": "add"}) for call in calls] == [(("i8",), "add")] * 3
    assert taken == ["add", "add"]
    assert calls[0](step, ("i8",), output="ptx") == "machine code"
    assert calls[0](SimpleNamespace(targetoptions={}), ("i8",), {"abi_name": "add"}) == "machine code"


def test_what_was_replaced_comes_back():
    place = SimpleNamespace(name="real")

    def fail_inside():
        with replaced(place, "name", "other"):
            raise KeyError(place.name)

    with pytest.raises(KeyError, match="other"):
        fail_inside()

    assert place.name == "real"
