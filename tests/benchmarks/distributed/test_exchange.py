"""Processes that benchmarks start."""

import os
import signal
import subprocess
import sys
import time

import pytest

from benchmarks.distributed.exchange import run_processes


def wait(rank, count, device, folder):
    with open(f"{folder}/{rank}", "w") as file:
        file.write(str(os.getpid()))
    # Longer than a test may take.
    time.sleep(3600)


@pytest.mark.full
def test_an_interrupted_benchmark_leaves_no_processes(tmp_path):
    program = subprocess.Popen([sys.executable, "-m", __name__, str(tmp_path)], stderr=subprocess.DEVNULL)
    try:
        while len(names := [name for name in os.listdir(tmp_path) if (tmp_path / name).stat().st_size]) < 2:
            assert program.poll() is None
            time.sleep(0.1)
        program.send_signal(signal.SIGINT)

        assert program.wait() != 0
    finally:
        program.kill()
        program.wait()
    for name in names:
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / name).read_text()), 0)


if __name__ == "__main__":
    # A shell has what it runs in the background ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run_processes(wait, 2, "cpu", sys.argv[1])
