"""What a device takes to aggregate edges, rows and little of either."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pyg_direct.ops.snapshots.aggregate import SMALL

# Numbers of a row, and of one read under a mask by slices and over CSR, for which seconds are known.
WIDTHS = (1, 4, 16, 64, 256, 1024)
SCANNED, SCANNED_CSR = (16, 64), (16, 64, 256, 1024)
# Of eight snapshots, how many have not an edge that is read under a mask.
LACKING = (1, 7)
# Numbers of a snapshot for which eight of a drawn sequence were aggregated in groups of every size and form: "mask" of
# 1, 2, 4 and 8, "split" of 2, 4 and 8; and weights they had.
TRIED = (2, 8, 32, 64, 128)
TRIED_VALUES = ("ones", "shared", "stacked")
# Edges that some snapshot lacks, of all, from which their neighbors in a slice wait for as good as all.
_WAITING = 1 / 64
# Of the host's time, what is added where a GPU works beside it: the host is at times busy otherwise, and slower than it
# was when it was measured. Of 72 cells on an H200, in two runs, 0.94 and 0.93 came within 5 % of the best, 0.89 and
# 0.90 without.
_HIDDEN = 0.2
# Bytes of the rows that edges are read from, for which they are known: in the nearest caches, in the next ones, in part
# of these, and beyond.
FOOTPRINTS = {"cpu": (2**17, 2**20, 2**24), "cuda": (2**20, 2**24, 2**26, 2**28)}


@dataclass(frozen=True)
class Speeds:
    """What a device needs.

    Attributes:
        seconds_of_edge: Seconds of an edge whose row has 1, 4, 16, 64, 256 and 1024 numbers, and of the row that a
            slice is added to; for rows of so many bytes in all as `footprints` tells.
        test_seconds: Of asking whether a snapshot has an edge.
        call_seconds: Of an aggregation of a single edge; on a GPU of one of many that are asked for without waiting, as
            those of a sequence are.
        launch_seconds: Of a second structure in one aggregation.
        floor_seconds: Of an aggregation of a single edge on a GPU that need not wait for the host.
        floor_more_seconds: Of a second structure there.
        bytes_per_second: From host memory to the device; 0 where these are one, or structures are made there.
        few_factor: How much longer an edge takes where there is so little to do that one CPU thread does it.
        footprints: Bytes, ascending.
        send_seconds: Of sending what a single edge takes.
        send_more_seconds: Of sending a second structure of one.
        threads_seconds: Of letting all threads of a CPU begin with a structure.
        seconds_of_number: Of a number of the features, whatever the edges: laid beside those of other snapshots,
            scaled, and laid apart again; as `footprints` tells.
        is_queued: Whether the device works while the host asks for what follows.
        again_seconds: Of a number of the results to which a second structure adds, beyond those of its edges.
        scan_seconds: Of an edge that seven of eight snapshots have, and of one that one has, beyond those of its row,
            where a union is read under a mask, slice by slice; at 16 and 64 numbers of all snapshots.
        scan_csr_seconds: Of such edges where it is read over CSR; at 16, 64, 256 and 1024 numbers.
        convert_seconds: Of making CSR of a structure that was sent.
        csr_seconds: Of the host where a structure is summed over CSR, beyond those of slices.
        factors: How much longer whole groups take than the sum of all this, without weights, with those of edges and
            with those of edges in snapshots: a row for each size and form, at 2, 8, 32, 64 and 128 numbers of a
            snapshot; empty where none were tried.
    """

    seconds_of_edge: tuple[tuple[float, ...], ...]
    test_seconds: float
    call_seconds: float
    launch_seconds: float
    bytes_per_second: float
    few_factor: float = 1.0
    footprints: tuple[int, ...] = FOOTPRINTS["cpu"]
    send_seconds: float = 0.0
    send_more_seconds: float = 0.0
    threads_seconds: float = 0.0
    seconds_of_number: tuple[float, ...] = (0.0, 0.0, 0.0)
    is_queued: bool = False
    again_seconds: float = 0.0
    scan_seconds: tuple[tuple[float, ...], ...] = ()
    scan_csr_seconds: tuple[tuple[float, ...], ...] = ()
    convert_seconds: float = 0.0
    floor_seconds: float = 0.0
    floor_more_seconds: float = 0.0
    csr_seconds: float = 0.0
    factors: tuple[tuple[tuple[float, ...], ...], ...] = ()

    def together(self, host: float, device: float) -> float:
        """Seconds that one group of a sequence adds, of what the host does for it and the device."""
        return max(host, device) + _HIDDEN * host if self.is_queued else host + device

    def add_up(self, num_edges: int, width: float, footprint: int) -> float:
        """Seconds of so many edges in one structure."""
        if num_edges * width < SMALL:
            return num_edges * self.per_edge(width, footprint) * self.few_factor
        return num_edges * self.per_edge(width, footprint) + self.threads_seconds

    def per_edge(self, width: float, footprint: int = 0) -> float:
        """Seconds of an edge with `width` numbers from rows of so many bytes; between those measured in proportion."""
        width = max(1.0, width)
        across = _interpolate(
            [_interpolate(known, WIDTHS, width) for known in self.seconds_of_edge], self.footprints, footprint
        )
        return across * max(1.0, width / WIDTHS[-1])

    def per_number(self, footprint: int) -> float:
        """Seconds of a number of the features, of so many bytes in all."""
        if min(self.seconds_of_number) <= 0:
            return max(0.0, *self.seconds_of_number)
        return _interpolate(self.seconds_of_number, self.footprints, footprint)

    def scan(self, width: int, share: float, is_csr: bool = False) -> float:
        """Seconds of an edge for the numbers of snapshots that have it not: a `share` of them has."""
        tables, places = (self.scan_csr_seconds, SCANNED_CSR) if is_csr else (self.scan_seconds, SCANNED)
        if not tables:
            return 0.0
        few, most = (_interpolate(known, places, width) for known in tables)
        # Rows that are wider than any measured take longer in proportion, and narrower ones less.
        scale = max(1.0, width / places[-1]) * min(1.0, width / places[0])
        lacking = max(0.0, 1 - share)
        low, high = (count / 8 for count in LACKING)
        across = few + (most - few) * min(1.0, max(0.0, lacking - low) / (high - low))
        return scale * across * min(1.0, lacking / _WAITING)

    def factor(self, form: str, size: int, channels: int, values: str) -> float:
        """How much longer than told by their parts groups of so many snapshots take."""
        if not self.factors:
            return 1.0
        power = (size - 1).bit_length()
        row = power if form == "mask" or power == 0 else power + 3
        return _interpolate(self.factors[TRIED_VALUES.index(values)][row], TRIED, channels)


def _interpolate(values: Sequence[float], places: Sequence[float], at: float) -> float:
    """The value at a place between others on a line of logarithms; that of the nearest end beyond them."""
    at = min(max(at, places[0]), places[-1])
    high = next(number for number in range(1, len(places)) if at <= places[number])
    share = math.log(at / places[high - 1]) / math.log(places[high] / places[high - 1])
    return math.exp((1 - share) * math.log(values[high - 1]) + share * math.log(values[high]))
