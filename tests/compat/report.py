"""Hooks of pytest that write results down: COMPAT_RESULTS names a file of JSON lists, test id, outcome, reason."""

import json
import os


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
