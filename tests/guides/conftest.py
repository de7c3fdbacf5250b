"""Says which package the guides run with. Where it must be a wheel (`PYG_DIRECT_INSTALLED`), all of them run."""

import os
import sys
from pathlib import Path

import pytest

import pyg_direct


def pytest_report_header() -> str:
    return f"pyg_direct {pyg_direct.__version__} from {Path(pyg_direct.__file__).parent}"


def pytest_sessionstart() -> None:
    if os.environ.get("PYG_DIRECT_INSTALLED") and not Path(pyg_direct.__file__).is_relative_to(sys.prefix):
        raise pytest.UsageError(f"{pyg_direct.__file__} is not the installed wheel")


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("PYG_DIRECT_INSTALLED") and reporter is not None and reporter.stats.get("skipped"):
        # What a guide needs is there, so that none is left out.
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
