"""Two hosts on one machine: network namespaces with addresses of their own, and a cable that can be pulled."""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

CLONE_NEWTIME, CLONE_NEWNET = 0x80, 0x40000000
ADDRESSES = ("10.213.0.1", "10.213.0.2")
INTERFACE = "eth0"


def _ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Hosts:
    """Host r has `ADDRESSES[r]` on its `INTERFACE`, and nothing else but a loopback."""

    def __init__(self):
        self.names = [f"pyg{os.getpid()}-{number}" for number in range(2)]

    def __enter__(self):
        try:
            for name in self.names:
                _ip("netns", "add", name)
            first, second = self.names
            _ip("link", "add", INTERFACE, "netns", first, "type", "veth", "peer", "name", INTERFACE, "netns", second)
            for name, address in zip(self.names, ADDRESSES, strict=True):
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
                for interface in ("lo", INTERFACE):
                    _ip("-n", name, "link", "set", interface, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for name in self.names:
            # What was started there and stays in the background.
            found = subprocess.run(["ip", "netns", "pids", name], check=False, capture_output=True, text=True)
            for pid in map(int, found.stdout.split()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def on(self, number, *command, mounts=()):
        """A command as it is run on a host, which bears the host's name, and sees folders in the place of others.

        Args:
            number: Of the host.
            command: Words.
            mounts: (folder, the one in whose place it is seen).
        """
        name = self.names[number]
        steps = [f"hostname {name}", *(f"mount --bind {folder} {place}" for folder, place in mounts), 'exec "$@"']
        return ["ip", "netns", "exec", name, "unshare", "--mount", "--uts", "sh", "-ec", "; ".join(steps), "sh",
                *map(str, command)]  # fmt: skip

    def cut(self):
        """Pull the cable."""
        _ip("-n", self.names[1], "link", "set", INTERFACE, "down")

    def heal(self):
        """Put it back."""
        _ip("-n", self.names[1], "link", "set", INTERFACE, "up")


def can_make_hosts():
    """Whether this process may."""
    if os.geteuid() != 0 or shutil.which("ip") is None or not Path("/proc/self/timens_offsets").exists():
        return False
    try:
        with Hosts():
            return True
    except subprocess.CalledProcessError:
        return False


def can_name_hosts():
    """Whether hosts may also have names and mounts of their own."""
    if not can_make_hosts() or any(shutil.which(program) is None for program in ("unshare", "hostname", "mount")):
        return False
    with Hosts() as hosts, tempfile.TemporaryDirectory() as folder:
        words = hosts.on(0, "hostname", mounts=[(folder, folder)])
        done = subprocess.run(words, check=False, capture_output=True, text=True)
        return done.stdout.strip() == hosts.names[0]


def enter_host(name, ahead=0):
    """Go on in a host, whose clocks are some seconds ahead of those of the machine. Before any thread is started."""
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result):
        if result:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    with Path(f"/run/netns/{name}").open() as file:
        check(libc.setns(file.fileno(), CLONE_NEWNET))
    if ahead:
        check(libc.unshare(CLONE_NEWTIME))
        Path("/proc/self/timens_offsets").write_text(f"monotonic {ahead} 0\nboottime {ahead} 0\n")
        with Path("/proc/self/ns/time_for_children").open() as file:
            check(libc.setns(file.fileno(), CLONE_NEWTIME))
        # The time of day knows no namespace.
        now = time.time
        time.time = lambda: now() + ahead
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
