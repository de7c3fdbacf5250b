"""Says which package the guides run with; where it must be an installed wheel (`PYG_DIRECT_INSTALLED`), it is."""

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
