"""The report of a loader, in words and as a picture."""

import json

import pytest
import torch

from pyg_direct import NeighborLoader
from pyg_direct.errors import ArgumentError
from pyg_direct.features.tier_report import Report, TierReport
from pyg_direct.loader.base_loader import make_batch
from pyg_direct.loader.batch_report import (
    FETCH,
    FINISH,
    START,
    WAIT,
    BatchTimes,
    EpochRecord,
    LoaderReport,
    Recorder,
    Span,
    Stages,
    read_spans,
)
from pyg_direct.profiling import Origin
from tests.batches import make_data

TIERS = [TierReport("GPU memory", 10, 60), TierReport("memory of other GPUs", 20, 30, "NVLink"),
         TierReport("host memory (unified)", 70, 10, "PCIe"), TierReport("file", 100, 2, "PCIe")]  # fmt: skip


class Mark:
    """An event of a GPU, so many milliseconds after the origin."""

    def __init__(self, at):
        self.at, self.is_waited_for = at, False

    def elapsed_time(self, other):
        return other.at - self.at

    def synchronize(self):
        self.is_waited_for = True


class MarkedRecorder(Recorder):
    """Takes marks where a GPU would have events."""

    def __init__(self, last):
        super().__init__(last, torch.device("cpu"))
        self.clock, self.num_new = 0.0, 0

    def begin(self, attributes):
        return EpochRecord(self, Origin(Mark(0), 0))

    def mark(self):
        self.clock += 1
        if self._spare:
            mark = self._spare.pop()
            mark.at = self.clock
            return mark
        self.num_new += 1
        return Mark(self.clock)


def make_times(spans, origin=None, used=0, events=None):
    times = BatchTimes(0, origin)
    for stage, span in spans.items():
        times.spans[stage] = span
    times.used, times.events = used, events or {}
    return times


def make_report():
    spans = [Span("sample", "host", 0, 0.0, 0.002), Span("fetch", "host", 0, 0.002, 0.003),
             Span("wait", "host", 0, 0.0, 0.003), Span("train", "host", 0, 0.003, 0.012),
             Span("sample", "host", 1, 0.003, 0.004), Span("sample", "host", 1, 0.005, 0.006),
             Span("wait", "host", 1, 0.012, 0.013), Span("wait", "GPU", 1, 0.012, 0.0125)]  # fmt: skip
    return LoaderReport(["topology: somewhere"], 7, 2, spans, {"x": Report(TIERS, 100)})


def test_times_of_the_host():
    first = make_times({START: (1000, 3000), FINISH: (4000, 5000), FETCH: (5000, 6000), WAIT: (500, 7000)}, used=9000)
    second = make_times({WAIT: (9000, 9500)})

    spans = read_spans([first, second])

    in_ns = [(s.lane, s.where, s.batch, round(1e9 * s.begin), round(1e9 * s.end)) for s in spans]
    assert sorted(in_ns) == sorted([
        ("sample", "host", 0, 500, 2500), ("sample", "host", 0, 3500, 4500), ("fetch", "host", 0, 4500, 5500),
        ("wait", "host", 0, 0, 6500), ("train", "host", 0, 6500, 8500), ("wait", "host", 1, 8500, 9000),
    ])  # fmt: skip


def test_times_of_the_gpu_are_on_the_clock_of_the_host():
    origin, other = Origin(Mark(0), 1_000_000), Origin(Mark(0), 50_000_000)
    marks = {START: (Mark(0.5), Mark(1)), FETCH: (Mark(1), Mark(2)), WAIT: (Mark(2), Mark(2.5))}
    batches = [make_times({WAIT: (1_000_000, 2_000_000)}, origin, events=marks),
               make_times({WAIT: (4_000_000, 4_500_000)}, origin, events={WAIT: (Mark(6), Mark(6.25))}),
               make_times({WAIT: (51_000_000, 52_000_000)}, other, events={WAIT: (Mark(1), Mark(2))})]  # fmt: skip

    spans = [s for s in read_spans(batches) if s.where == "GPU"]

    in_us = [(s.lane, s.batch, round(1e6 * s.begin), round(1e6 * s.end)) for s in spans]
    # What the model did between two epochs is no time of a batch.
    assert sorted(in_us) == sorted([
        ("sample", 0, 500, 1000), ("fetch", 0, 1000, 2000), ("wait", 0, 2000, 2500), ("train", 0, 2500, 6000),
        ("wait", 1, 6000, 6250), ("wait", 2, 50_000, 51_000),
    ])  # fmt: skip
    assert batches[-1].events[WAIT][1].is_waited_for


def test_events_of_a_stage_stand_around_it_and_are_used_again():
    recorder = MarkedRecorder(last=2)
    stages = Stages(lambda number, item: item, lambda pending, number: pending, lambda sample, number, item: sample)
    for _ in range(3):
        record = recorder.begin({})
        timed = record.around(stages)
        made = (make_batch(timed, number, item) for number, item in record.follow((n, n) for n in range(4)))
        assert list(record.hand_out(made)) == [0, 1, 2, 3]

    seconds = {span.lane: span.end - span.begin for span in read_spans(recorder.done) if span.where == "GPU"}

    # Two events around each part; those of a fetch and a sample lie inside the wait.
    assert seconds == pytest.approx({"sample": 0.001, "fetch": 0.001, "wait": 0.005, "train": 0.001})
    # Those of the batches kept, of the one on its way, and of the last wait of an epoch.
    assert recorder.num_new <= 6 * 3 + 2 * 3


def test_no_batches_have_no_times():
    assert read_spans([]) == []


def test_parts_of_a_batch_are_added_up():
    report = make_report()

    assert report.seconds("sample") == pytest.approx([0.002, 0.002])
    assert report.seconds("wait", "GPU") == pytest.approx([0.0005])
    assert report.seconds("train", "GPU") == []


def test_a_table_is_told():
    lines = str(make_report()).splitlines()

    assert lines[0] == "topology: somewhere"
    assert lines[1].split() == ["last", "2", "of", "7", "batches", "p20", "p50", "p80", "in", "all", "share"]
    assert lines[2].split() == ["host:", "sample", "2", "ms", "2", "ms", "2", "ms", "4", "ms", "30.8%"]
    assert lines[5].split() == ["host:", "train", *3 * ["9", "ms"], "9", "ms", "69.2%"]
    assert lines[6].split()[:4] == ["GPU:", "wait", "500", "us"]
    assert lines[-2] == "rows over PCIe: 1.2 KB, 171.4 B a batch"
    assert lines[-1] == "rows over NVLink: 3.0 KB, 428.6 B a batch"


def test_all_of_it_is_told_as_json():
    report = make_report()._replace(list_bytes=2100)

    told = json.loads(json.dumps(report.to_tree()))

    assert set(told) == {*LoaderReport._fields, "seconds", "link_bytes"}
    assert [Span(**span) for span in told["spans"]] == report.spans
    assert [TierReport(**tier) for tier in told["features"]["x"]["tiers"]] == TIERS
    assert (told["features"]["x"]["row_bytes"], told["features"]["x"]["num_read"]) == (100, 102)
    assert told["link_bytes"] == {"PCIe": 1200, "NVLink": 3000}
    assert (told["places"], told["num_batches"], told["num_timed"], told["list_bytes"]) == (
        ["topology: somewhere"], 7, 2, 2100)  # fmt: skip
    lanes = [("host", "sample"), ("host", "fetch"), ("host", "wait"), ("host", "train"), ("GPU", "wait")]
    assert [(part["where"], part["lane"]) for part in told["seconds"]] == lanes
    assert told["seconds"][0]["sum"] == pytest.approx(0.004)
    assert told["seconds"][-1] == pytest.approx(
        {"where": "GPU", "lane": "wait", **dict.fromkeys(("p20", "p50", "p80", "sum"), 0.0005)})  # fmt: skip


def test_its_numbers_are_flat_for_loggers():
    report = make_report()._replace(list_bytes=2100)

    numbers = report.to_dict()

    assert json.loads(json.dumps(numbers)) == numbers
    assert all(type(number) in (int, float) for number in numbers.values())
    assert (numbers["num_batches"], numbers["num_timed"]) == (7, 2)
    assert (numbers["bytes/PCIe"], numbers["bytes/NVLink"], numbers["bytes/neighbor_lists"]) == (1200, 3000, 2100)
    assert numbers["seconds/host/sample/sum"] == pytest.approx(0.004)
    assert numbers["seconds/GPU/wait/p50"] == pytest.approx(0.0005)
    assert numbers["features/x/num_read"] == 102
    assert numbers["features/x/host_memory_unified/num_read"] == 10


def test_reads_that_were_not_counted_are_no_number():
    report = Report([TierReport("GPU memory", 10, None)], 100)

    assert report.to_dict() == {"row_bytes": 100, "GPU_memory/num_rows": 10}


def test_a_notebook_shows_tables_and_the_figure():
    report = make_report()

    tables, figure = report._repr_html_(), report.draw()

    assert "topology: somewhere" in tables
    assert "host: sample" in tables
    assert "memory of other GPUs" in tables
    assert "rows over PCIe: 1.2 KB" in tables
    assert "<table>" in LoaderReport(["here"], 0, 0, [], {})._repr_html_()
    assert len(figure.axes) == 2
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert len(report.features["x"].draw().axes) == 1
    assert "60" in report.features["x"]._repr_html_()


def test_a_report_may_be_had_without_printing_it(capsys):
    loader = NeighborLoader(make_data(), [3], batch_size=16, device="cpu")
    loader.record()
    list(loader)

    report = loader.tell()

    assert capsys.readouterr().out == ""
    assert report.to_dict()["num_batches"] == len(loader)


def test_bytes_of_neighbor_lists_are_told():
    told = make_report()._replace(list_bytes=2100)

    assert str(told).splitlines()[-1] == "neighbor lists over PCIe, by what was sampled: 2.1 KB, 300 B a batch"
    assert "by what was sampled, at most: 2.1 KB" in str(told._replace(list_bytes_are_most=True))
    assert "neighbor lists" not in str(make_report())


def test_a_picture_tells_bytes_over_links(tmp_path, monkeypatch):
    titles = []
    monkeypatch.setattr("matplotlib.figure.Figure.suptitle", lambda self, text, **_: titles.append(text))

    make_report()._replace(list_bytes=2100).draw(tmp_path / "batches.png")

    assert titles == ["rows over PCIe: 1.2 KB, 171.4 B a batch; rows over NVLink: 3.0 KB, 428.6 B a batch; "
                      "neighbor lists over PCIe, by what was sampled: 2.1 KB, 300 B a batch"]  # fmt: skip


def test_bytes_over_links():
    report = make_report()

    assert (report.link_bytes("PCIe"), report.link_bytes("NVLink")) == (1200, 3000)
    with pytest.raises(ArgumentError, match="link must be one of PCIe, NVLink, got 'USB'"):
        report.link_bytes("USB")


@pytest.mark.parametrize("report", [make_report(), LoaderReport(["here"], 0, 0, [], {})], ids=["full", "empty"])
def test_a_picture_is_drawn(tmp_path, report):
    path = report.draw(tmp_path / "batches.png")

    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_representation_is_short_however_many_batches_were_timed():
    report = make_report()._replace(spans=make_report().spans * 1000)

    assert repr(report) == "LoaderReport(num_batches=7, num_timed=2, spans=<8000>, features=['x'], list_bytes=0)"
