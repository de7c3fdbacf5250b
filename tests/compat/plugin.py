"""A pytest plugin for PyG's own tests: our loaders in the place of PyG's, and results written down.

Loaded by `-p tests.compat.plugin` before the tests import anything; COMPAT_RESULTS names the file of results, a JSON
list a line: test id, outcome, reason.
"""

import json
import os

import torch_geometric.testing.decorators as decorators
import torch_geometric.typing as settings

from pyg_direct.noedit.install import install

# Ours needs neither pyg-lib nor torch-sparse: tests that ask for pyg-lib's sampler are tests of ours. Where PyG's own
# sampler is reached all the same, it fails for lack of pyg-lib, so that none of its passes count as ours.
SETTINGS = ("WITH_PYG_LIB", "WITH_EDGE_TIME_NEIGHBOR_SAMPLE", "WITH_WEIGHTED_NEIGHBOR_SAMPLE")
has_package = decorators.has_package

for name in SETTINGS:
    setattr(settings, name, True)
decorators.WITH_PYG_LIB = True
decorators.has_package = lambda package: package == "pyg_lib" or has_package(package)
install(device="data")


def pytest_runtest_logreport(report):
    """Write down what came of a test: of its call, or of its preparation where that ended it."""
    if report.when == "call" or (report.when == "setup" and not report.passed):
        if report.skipped and isinstance(report.longrepr, tuple):
            reason = report.longrepr[2].removeprefix("Skipped: ")
        else:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = "" if report.passed else (crash.message if crash else str(report.longrepr)).split("\n")[0]
        with open(os.environ["COMPAT_RESULTS"], "a") as file:
            file.write(json.dumps([report.nodeid, report.outcome, reason]) + "\n")


def pytest_collectreport(report):
    """A file that cannot be imported is a failure of the file."""
    if report.failed:
        with open(os.environ["COMPAT_RESULTS"], "a") as file:
            file.write(json.dumps([report.nodeid, "failed", str(report.longrepr).split("\n")[-1]]) + "\n")
