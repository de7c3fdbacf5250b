"""The tests with the oldest and newest versions supported, for every Python: more than CI has time for.

    pip install nox
    nox -f .ci/noxfile.py                  # all, one after the other
    nox -f .ci/noxfile.py -s "tests(3.10, oldest)"
    PYG_DIRECT_TORCH_INDEX=https://download.pytorch.org/whl/cpu nox -f .ci/noxfile.py

Without an index torch comes from PyPI, with several gigabytes of CUDA libraries. `gpu` tests run too where there is a
GPU. CI itself runs a part of them with the oldest versions and with the newest: `.ci/versions`.
"""

import os

import nox

nox.options.default_venv_backend = "venv"
# torch has wheels for Python 3.13 from 2.5 on, numba from 0.61 on, numpy from 2.1 on.
VERSIONS = {
    "oldest": ["torch==2.6.0", "-c", ".ci/oldest.txt"],
    "known": ["-c", "constraints.txt"],
    "newest": ["--upgrade", "torch", "torch_geometric", "numba", "numba-cuda"],
}
CASES = [
    ("3.10", "oldest"),
    ("3.11", "oldest"),
    ("3.11", "known"),
    ("3.11", "newest"),
    ("3.12", "newest"),
    ("3.13", "newest"),
]


@nox.session
@nox.parametrize(("python", "versions"), CASES, ids=[", ".join(case) for case in CASES])
def tests(session: nox.Session, versions: str) -> None:
    """Install these versions, then run the tests given (all of them by default)."""
    session.chdir("..")
    index = os.environ.get("PYG_DIRECT_TORCH_INDEX")
    options = ["--extra-index-url", index] if index else []
    session.install(*options, *VERSIONS[versions], "-e", ".[test]")
    session.run("python", "-m", "pytest", *session.posargs, env={"PYG_DIRECT_CACHE": session.create_tmp()})
