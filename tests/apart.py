"""Tests that change more of a process than they can put back: `apart` marks those that run in one of their own.

Each process that runs tests starts another one for such a file, at its first test, and runs all of its tests there. It
ends that process before tests of its own, which may check the running processes.
"""

from __future__ import annotations

import contextlib
import os
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import pytest

from tests.processes import start_method

_IS_APART = "PYG_DIRECT_TESTS_APART"
_started: dict[str, _Apart] = {}


def run_apart(item: pytest.Item) -> list[pytest.TestReport] | None:
    """Reports of a test that ran in the process of its file; None for one that runs here."""
    if item.get_closest_marker("apart") is None:
        end_all()
        return None
    if item.get_closest_marker("skip") or _IS_APART in os.environ:
        return None
    file = str(item.path)
    if file not in _started:
        _started[file] = _Apart(file, item.config)
    try:
        return _started[file].run(item)
    except (EOFError, OSError):
        words = f"the process of its own ended with exit code {_started.pop(file).end()}"
        return [pytest.TestReport(item.nodeid, item.location, {}, "failed", words, "call")]


def end_all() -> None:
    """End the processes of all files."""
    while _started:
        _started.popitem()[1].end()


class _Apart:
    """A process that runs tests of one file."""

    def __init__(self, file: str, config: pytest.Config) -> None:
        context: Any = get_context(start_method())
        self.connection, theirs = context.Pipe()
        left_out = [name for name in config.option.plugins if name.startswith("no:")]
        arguments = [file, f"--rootdir={config.rootpath}", "-c", str(config.inipath)]
        # A forked process has imported Hypothesis, whose own assertions nobody reads.
        arguments += ["-W", "ignore:Module already imported so cannot be rewritten"]
        for name in ("no:terminal", "no:cacheprovider", *left_out):
            arguments += ["-p", name]
        self.process = context.Process(target=_serve, args=(arguments, theirs, dict(os.environ)), daemon=False)
        self.process.start()
        theirs.close()

    def run(self, item: pytest.Item) -> list[pytest.TestReport]:
        self.connection.send(item.nodeid)
        hook = item.config.hook
        return [hook.pytest_report_from_serializable(config=item.config, data=data) for data in self.connection.recv()]

    def end(self) -> int | None:
        with contextlib.suppress(OSError):
            self.connection.send(None)
        self.process.join(60)
        if self.process.is_alive():
            self.process.kill()
        return self.process.exitcode


def _serve(arguments: list[str], connection: Connection, environment: dict[str, str]) -> None:
    os.environ.update(environment, **{_IS_APART: "1"})
    # Options of the environment, `-n 2` for one, are meant for the process that runs all tests.
    os.environ.pop("PYTEST_ADDOPTS", None)
    pytest.main(arguments, plugins=[_Server(connection)])


class _Server:
    """In that process: runs the tests that it is asked for, one after the other."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._reports: list[Any] = []

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        while (nodeid := self._connection.recv()) is not None:
            self._reports = []
            # Another test of the file is announced as next, so that shared fixtures stay.
            following = next((item for item in session.items if item.nodeid != nodeid), None)
            session.config.hook.pytest_runtest_protocol(item=items[nodeid], nextitem=following)
            to_data = session.config.hook.pytest_report_to_serializable
            self._connection.send([to_data(config=session.config, report=report) for report in self._reports])
        session._setupstate.teardown_exact(None)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)
