"""`pyg-direct warm` leaves nothing to compile to the programs that come after it."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from pyg_direct.cli import compile_ahead, warm
from pyg_direct.cli.app import app
from pyg_direct.compiler.jit import GPU_KERNELS, CpuKernel, GpuCode, GpuKernel
from pyg_direct.compiler.shipped_loops import list_loops, read_parts, spell_type
from pyg_direct.errors import CudaError


def invoke(*arguments):
    return CliRunner(env={"COLUMNS": "500"}).invoke(app, ["warm", *arguments])


@pytest.fixture
def kernel(monkeypatch):
    """One kernel that no wheel holds, and the architectures that it is compiled for."""
    compile_ahead._import_kernels()
    chosen = min(GPU_KERNELS, key=lambda kernel: len(list(kernel.specialisations())))
    monkeypatch.setattr(compile_ahead, "GPU_KERNELS", [chosen])
    monkeypatch.setattr(compile_ahead, "find_shipped", lambda name: None)
    compiled = []
    monkeypatch.setattr(GpuKernel, "compile_all", lambda self, targets, choice: compiled.append((self, targets)))
    chosen.compiled = compiled
    yield chosen
    del chosen.compiled


@pytest.fixture
def compiled_loops(monkeypatch):
    """Loops that are asked for, instead of compiled."""
    loops = []
    monkeypatch.setattr(CpuKernel, "compile", lambda self, threads, args: loops.append((self.title, threads, args)))
    return loops


@pytest.mark.parametrize("name", warm.PARTS)
def test_every_listed_loop_of_a_part_is_compiled(compiled_loops, name):
    done = invoke("--only", name, "--no-gpu", "--jobs", "1")

    assert done.exit_code == 0, done.output
    compiled = [(title, threads, [*map(spell_type, args)]) for title, threads, args in compiled_loops]
    assert compiled == [*list_loops(name)]
    assert {title for title, *_ in compiled} == frozenset().union(*read_parts()[name])


PROGRAM = """
import logging, sys
import torch
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
from pyg_direct.distributed import partition_graph
partition_graph(sys.argv[1], torch.randint(90, (2, 700)), 3, node_rows={"x": torch.rand(90, 5)}, num_nodes=90)
"""


@pytest.mark.slow
def test_a_program_finds_loops_that_several_processes_compiled_at_once(tmp_path):
    environment = {**os.environ, "PYG_DIRECT_CACHE": str(tmp_path / "cache")}

    def run_python(*arguments):
        return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True,
                              timeout=280, check=False)  # fmt: skip

    # A GPU that is too old is told, and ends nothing.
    done = run_python("-m", "pyg_direct", "warm", "--only", "partition", "--only", "partition", "--arch", "7.0",
                      "--jobs", "2", "--json")  # fmt: skip
    after = run_python("-c", PROGRAM, str(tmp_path / "parts"))

    told = json.loads(done.stdout)
    assert done.returncode == 1, done.stderr
    assert told["failed"] == ["--arch must have compute capability 7.5 or more, got 7.0"]
    assert told["folder"] == str(tmp_path / "cache")
    assert told["compiled"] == told["kept"] > 3
    assert after.returncode == 0, after.stderr
    assert "compiled" not in after.stdout
    assert (tmp_path / "parts" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("text", "capability"),
    [("9.0", (9, 0)), ("90", (9, 0)), ("sm_90", (9, 0)), ("8.9", (8, 9)), ("10.0", (10, 0)), ("sm_100", (10, 0)),
     ("sm_90a", (9, 0))],
)  # fmt: skip
def test_architectures_are_read_as_people_write_them(text, capability):
    assert warm.read_architecture(text) == capability


def test_kernels_are_compiled_for_gpus_that_are_elsewhere(kernel):
    done = invoke("--no-cpu", "--arch", "9.0", "--arch", "sm_89", "--json", "--jobs", "1")

    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["failed"] == []
    assert {(found, tuple(targets)) for found, targets in kernel.compiled} == {(kernel, ((8, 0), (9, 0)))}
    assert len(kernel.compiled) == len(list(kernel.specialisations()))


def test_kernels_that_the_wheel_holds_are_left_alone(kernel, monkeypatch):
    monkeypatch.setattr(compile_ahead, "find_shipped", lambda name: "ptx")

    done = invoke("--no-cpu", "--arch", "9.0")

    assert done.exit_code == 0
    assert kernel.compiled == []
    assert "the wheel holds the kernels of these GPUs" in done.stdout


def test_gpus_that_are_too_old_are_told(kernel):
    done = invoke("--no-cpu", "--arch", "7.0", "--arch", "8.0")

    assert done.exit_code == 1
    assert "not compiled: --arch must have compute capability 7.5 or more, got 7.0" in done.stdout
    assert {tuple(targets) for _, targets in kernel.compiled} == {((8, 0),)}


def test_what_cannot_be_compiled_is_told_and_the_others_are(kernel, monkeypatch):
    ran = []

    def run(name):
        ran.append(name)
        if name == "times":
            raise OSError("no such thing")

    monkeypatch.setattr(compile_ahead, "compile_part", run)

    done = invoke("--only", "times", "--only", "links", "--no-gpu", "--jobs", "1")

    assert done.exit_code == 1
    assert ran == ["times", "links"]
    assert "not compiled: CPU loops, times: OSError: no such thing" in done.stdout


def test_code_is_loaded_where_there_is_a_gpu(kernel, monkeypatch):
    loaded = []

    def load(code, index):
        loaded.append((code, index))
        if index == 1:
            raise CudaError("cuModuleLoadData", 218, "CUDA_ERROR_INVALID_PTX", "too new")

    monkeypatch.setattr(compile_ahead.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(compile_ahead.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(compile_ahead, "abilities", lambda index: type("A", (), {"compute_capability": (8, index)}))
    monkeypatch.setattr(compile_ahead, "load_function", load)
    monkeypatch.setattr(GpuKernel, "compile", lambda self, capability, choice: GpuCode(f"{self.name} {capability}"))

    done = invoke("--no-cpu", "--json", "--jobs", "1")

    count = len(list(kernel.specialisations()))
    assert done.exit_code == 1
    assert loaded == [(GpuCode(f"{kernel.name} {(8, index)}"), index) for index in (0, 1) for _ in range(count)]
    assert len(json.loads(done.stdout)["failed"]) == count
    assert f"GPU kernel, {kernel.name}, on GPU 1: cuModuleLoadData returned" in done.stdout


@pytest.mark.parametrize("line", ["--no-cpu --no-gpu", "--arch 9.0 --no-gpu", "--arch hopper", "--only links --no-cpu",
                                  "--only cpu", "--jobs 0"])  # fmt: skip
def test_bad_usage_is_told(line, monkeypatch):
    monkeypatch.setattr(compile_ahead, "compile_ahead", lambda *args, **options: pytest.fail("compiled"))

    assert invoke(*line.split()).exit_code == 2
