"""Objects with shared memory inside, sent from one process of a host to others of a `torch.distributed` group.

`Desk` hands out letters: bytes that one process gives to others of its host and user, over a socket that only they can
reach.
"""

from __future__ import annotations

import json
import os
import pickle
import platform
import socket
import stat
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from multiprocessing import process
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from pyg_direct.errors import PygDirectError

# Number of the receiver, and of the bytes that follow.
_NUMBER = struct.Struct("<q")
# Seconds that sender and receiver wait for each other: they come at once, or not at all.
_SECONDS = 60.0


class Desk:
    """Socket that hands out letters, in a folder that only this user can enter.

    Attributes:
        path: Name of the socket, for `fetch_letter`; it is no secret.
    """

    def __init__(self, door: socket.socket, path: str) -> None:
        self._door, self.path = door, path

    def hand_out(self, letters: Mapping[int, bytes]) -> None:
        """Give each receiver its letter, once, until all have theirs."""
        self._door.settimeout(_SECONDS)
        left = dict(letters)
        while left:
            visitor, _ = self._door.accept()
            with visitor:
                visitor.settimeout(_SECONDS)
                (number,) = _NUMBER.unpack(read_whole(visitor, _NUMBER.size))
                letter = left.pop(number)
                visitor.sendall(_NUMBER.pack(len(letter)) + letter)


@contextmanager
def open_desk() -> Iterator[Desk]:
    """Open a desk for the block."""
    # Only its owner may enter.
    with tempfile.TemporaryDirectory(prefix="pyg_direct") as folder, socket.socket(socket.AF_UNIX) as door:
        path = str(Path(folder) / "desk")
        door.bind(path)
        door.listen(socket.SOMAXCONN)
        yield Desk(door, path)


def fetch_letter(path: str, number: int) -> bytes:
    """Fetch the letter of a number from the desk of a process of this host and user."""
    folder = os.stat(os.path.dirname(path))
    if folder.st_uid != os.getuid() or stat.S_IMODE(folder.st_mode) & (stat.S_IRWXG | stat.S_IRWXO):
        raise PygDirectError(f"letters must lie in a folder that only this user can enter, got {path!r}")
    with socket.socket(socket.AF_UNIX) as desk:
        desk.settimeout(_SECONDS)
        desk.connect(path)
        desk.sendall(_NUMBER.pack(number))
        (size,) = _NUMBER.unpack(read_whole(desk, _NUMBER.size))
        return read_whole(desk, size)


def read_whole(connection: socket.socket, size: int) -> bytes:
    """Read so many bytes."""
    pieces = bytearray()
    while len(pieces) < size:
        piece = connection.recv(size - len(pieces))
        if not piece:
            raise ConnectionResetError("the other end is gone")
        pieces += piece
    return bytes(pieces)


T = TypeVar("T")


def has_group() -> bool:
    """Report whether this process is in a process group."""
    return dist.is_available() and dist.is_initialized()


def count_processes() -> int:
    """Return the number of processes of the group, or 1 without a group."""
    return dist.get_world_size() if has_group() else 1


def identify_host() -> str:
    """Return a word that all processes that can share memory with this one have in common."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    space = Path("/proc/self/ns/pid")
    started = boot.read_text().strip() if boot.exists() else ""
    return f"{platform.node()} {started} {os.readlink(space) if space.is_symlink() else ''}"


def gather(value: Any, device: torch.device | None = None) -> list[Any]:
    """Gather the value of every process of the group, by rank; called by all of them.

    Args:
        value: Sent as JSON, so that no data from the network is unpickled: tuples come as lists.
        device: The GPU through which a group over NCCL alone sends it; None is the current one.
    """
    words = json.dumps(value).encode()
    # As the collectives of torch for objects choose it.
    on_cpu = "cpu:" in dist.get_backend_config()
    place = torch.device("cpu") if on_cpu else device or torch.device("cuda", torch.cuda.current_device())
    size = torch.tensor([len(words)], device=place)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    counts = torch.cat(sizes).tolist()
    # All are padded to the longest.
    own = torch.from_numpy(np.frombuffer(words.ljust(max(counts)), np.uint8).copy()).to(place)
    found = [torch.empty_like(own) for _ in counts]
    dist.all_gather(found, own)
    return [json.loads(each.cpu().numpy()[:count].tobytes()) for each, count in zip(found, counts, strict=True)]


def give_to_host(make: Callable[[list[Any]], T], about: Any) -> T:
    """Call `make` in the first process of each host, and return its result in every process of that host; called by
    all.

    The result goes as a pickle, because it holds handles of shared memory, and so does the word that opens the handles.
    Both travel over a socket that only this user's processes of the host reach. Only the address of the socket goes
    through the group.

    Args:
        make: Called in the first process with the `about` of its host's processes, by rank.
    """
    hosts = gather((identify_host(), about))
    here = [rank for rank, (host, _) in enumerate(hosts) if host == hosts[dist.get_rank()][0]]
    leads = dist.get_rank() == here[0]
    made: Any = None
    error: BaseException | None = None
    letters: dict[int, bytes] = {}
    desk: Desk | None = None
    with ExitStack() as stack:
        if leads:
            try:
                made = make([hosts[rank][1] for rank in here])
                # A letter each, because the descriptors in it can be taken once.
                letters = {rank: _seal(made) for rank in here[1:]}
                desk = stack.enter_context(open_desk()) if letters else None
            except Exception as caught:
                error = caught
        said = gather((None if desk is None else desk.path, None if error is None else repr(error)))
        failures = [failure for _, failure in said]
        if not any(failures):
            try:
                if desk is not None:
                    desk.hand_out(letters)
                elif not leads:
                    made = _open(fetch_letter(said[here[0]][0], dist.get_rank()))
            except Exception as caught:
                error = caught
            # The first one hands descriptors out until all have theirs.
            failures = gather(None if error is None else repr(error))
    if error is not None:
        raise error
    failed = next((rank for rank, failure in enumerate(failures) if failure is not None), None)
    if failed is not None:
        raise PygDirectError(
            f"process {failed} failed, so that process {dist.get_rank()} gets nothing: {failures[failed]}"
        )
    return made  # type: ignore[no-any-return]


def _seal(made: Any) -> bytes:
    """Make a letter: the word of this process, and the pickle."""
    return pickle.dumps((bytes(process.current_process().authkey), bytes(ForkingPickler.dumps(made))))


def _open(letter: bytes) -> Any:
    word, pickled = pickle.loads(letter)
    with _know(word):
        return pickle.loads(pickled)


@contextmanager
def _know(word: bytes) -> Iterator[None]:
    """Use another process's word at its sockets; each process that torchrun starts has its own."""
    current = process.current_process()
    before = current.authkey
    current.authkey = word
    try:
        yield
    finally:
        current.authkey = before
