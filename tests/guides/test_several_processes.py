"""The guides for several processes, with two of them on the CPU, as a user starts them."""

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import parse_args

import pyg_direct
from tests.processes import LOST, LostError, begin_until_joined

EXAMPLES = Path(__file__).parents[2] / "examples"
# For runs that are begun anew, on a busy machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run(*command):
    environment = {k: v for k, v in os.environ.items() if k != "PYG_DIRECT_DATA"}
    environment |= {"PYTHONPATH": str(Path(pyg_direct.__file__).parents[1]), "OMP_NUM_THREADS": "1",
                    "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip

    def start():
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, check=False)
        if done.returncode != 0 and LOST[0] in done.stderr:
            raise LostError(done.stderr)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return begin_until_joined(start)


def options(count, epochs=6):
    return ["--device", "cpu", "--scale", "0.003", "--epochs", str(epochs), "--batch-size", str(64 // count)]


def losses_of(output):
    return [float(loss) for loss in re.findall(r"^epoch \d: loss ([\d.]+), ", output, re.MULTILINE)]


def test_torchrun_does_what_spawned_processes_do():
    spawned = run(EXAMPLES / "multi_gpu_sage.py", "--processes", "2", *options(2))

    output = run("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", EXAMPLES / "multi_gpu_sage.py",
                 *options(2, epochs=2))  # fmt: skip

    losses = losses_of(spawned)
    assert "with 2 processes" in spawned
    assert len(losses) == 6
    assert losses[-1] < 0.7 * losses[0], spawned
    assert float(re.search(r"test ([\d.]+)%", spawned)[1]) > 15, spawned
    assert losses_of(output) == pytest.approx(losses[:2], rel=0.02)


def test_one_process_is_enough():
    output = run(EXAMPLES / "multi_gpu_sage.py", *options(1, epochs=1)[:-2])

    assert "with 1 processes" in output
    assert len(losses_of(output)) == 1


def test_quivers_steps_train_two_processes():
    output = run(EXAMPLES / "multi_gpu_quiver_style.py", "--processes", "2", *options(2))

    losses = losses_of(output)
    assert len(losses) == 6
    assert losses[-1] < 0.7 * losses[0], output


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs lightning")
def test_lightning_trains_two_processes():
    output = run("-W", "ignore", EXAMPLES / "multi_gpu_lightning.py", "--processes", "2", *options(2))

    losses = losses_of(output)
    assert len(losses) == 6
    assert losses[-1] < 0.7 * losses[0], output


@pytest.mark.parametrize("more", [[], ["--exchange"]], ids=["one memory", "exchange"])
def test_processes_that_hold_parts_learn(more):
    output = run(EXAMPLES / "distributed_worker.py", "--processes", "2", "--device", "cpu", "--scale", "0.003",
                 "--epochs", "4", "--batch-size", "32", *more)  # fmt: skip

    losses = losses_of(output)
    assert len(losses) == 4
    assert losses[-1] < 0.85 * losses[0], output
    assert float(re.search(r"test ([\d.]+)%", output)[1]) > 15, output


@pytest.mark.full
def test_igbh_example_trains_two_processes_on_one_graph_and_on_parts_alike(tmp_path):
    small = [EXAMPLES / "igbh_rgat.py", "--device", "cpu", "--scale", "1e-5", "--features", "16", "--classes", "5",
             "--hidden", "16", "--heads", "2", "--batch-size", "64", "--fanouts", "5", "3", "2", "--lr", "0.02",
             "--evaluations", "2", "--epochs", "1", "--folder", tmp_path / "igbh", "--target", "1.1"]  # fmt: skip
    ranks = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    found = re.compile(r"^epoch ([\d.]+: loss [\d.]+, accuracy [\d.]+), ", re.MULTILINE)

    whole = run(*ranks, *small)
    run(*small, "--partition", tmp_path / "parts", "--write-parts", "2")
    parts = run(*ranks, *small, "--partition", tmp_path / "parts")

    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", whole)]
    assert "2 processes" in whole
    assert len(losses) == 2
    assert losses[1] < 0.95 * losses[0], whole
    assert found.findall(parts) == found.findall(whole)


@pytest.mark.parametrize("start", [{"WORLD_SIZE": "2", "RANK": "0"}, {}], ids=["torchrun", "partition only"])
def test_a_partition_that_is_not_named_is_asked_for(start, monkeypatch, capsys):
    program = str(EXAMPLES / "distributed_worker.py")
    monkeypatch.setattr(sys, "argv", [program, *([] if start else ["--partition-only"])])
    monkeypatch.syspath_prepend(EXAMPLES)
    for name, value in start.items():
        monkeypatch.setenv(name, value)

    # It ends before it starts others: here, as an interpreter of its own takes seconds to import torch.
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(program, run_name="__main__")

    assert ended.value.code == 2
    assert "--partition must name the folder" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray")
def test_a_process_that_holds_no_part_learns():
    output = run(EXAMPLES / "distributed_server_client.py", "--device", "cpu", "--scale", "0.003", "--epochs", "3",
                 "--batch-size", "32")  # fmt: skip

    losses = losses_of(output)
    assert len(losses) == 3
    assert losses[-1] < 0.9 * losses[0], output


def test_slurm_starts_the_program_on_every_host(tmp_path):
    """With programs in the place of SLURM's that print what they are given."""
    for name, body in {"scontrol": "printf 'first\\nsecond\\n'", "srun": 'printf "%s\\n" "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "host[1-4]", "SLURM_JOB_ID": "30007", "SLURM_NNODES": "4"}

    done = subprocess.run(["bash", EXAMPLES / "distributed_worker.slurm", "/data/parts"], check=True, text=True,
                          capture_output=True, env={"PATH": f"{tmp_path}:{os.environ['PATH']}", **job})  # fmt: skip

    program, *arguments = done.stdout.splitlines()
    args = parse_args(arguments)
    assert program == "torchrun"
    assert (args.nnodes, args.nproc_per_node, args.rdzv_endpoint) == ("4", "4", "first:30007")
    assert (EXAMPLES.parent / args.training_script).exists()
    assert args.training_script_args == ["--partition", "/data/parts"]
