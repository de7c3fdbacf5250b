import numpy as np
import pytest

from pyg_direct.errors import ArgumentError, ArgumentTypeError, LoaderWarning
from pyg_direct.runtime.host.host_memory import check_size, parse_size


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [
        (np.int64(1000), 1000),
        (0, 0), (1000, 1000), ("1000", 1000), ("1000B", 1000), ("4K", 4 << 10), ("4KB", 4 << 10), ("4KiB", 4 << 10),
        ("200M", 200 << 20), ("0.5G", 1 << 29), (".5G", 1 << 29), ("3GB", 3 << 30), ("2T", 2 << 40),
        (" 16 mb ", 16 << 20), ("1.5k", 1536), ("0", 0),
    ],
)  # fmt: skip
def test_sizes_are_read_as_quiver_reads_them(size, num_bytes):
    got = parse_size(size)

    assert (got, type(got)) == (num_bytes, int)


@pytest.mark.parametrize(("share", "num_bytes"), [("0%", 0), ("20%", 200), ("12.5 %", 125), (" 100% ", 1000)])
def test_a_share_is_taken_of_the_whole(share, num_bytes):
    got = parse_size(share, 1000)

    assert got == num_bytes


@pytest.mark.parametrize("size", ["", "M", "-1", "-5%", "1,5G", "ten", "1 000", "2P", "%", "nan", "1e9", "0x10"])
def test_words_that_are_no_size_are_refused(size):
    with pytest.raises(ArgumentError, match="device_cache_size must look like") as caught:
        parse_size(size, 1000)

    assert repr(size) in str(caught.value)


def test_a_share_needs_a_whole():
    with pytest.raises(ArgumentError, match="must look like"):
        parse_size("20%")


def test_a_share_is_offered_where_there_is_a_whole():
    with pytest.raises(ArgumentError, match="or '3GB', got '20%'"):
        parse_size("20%")
    with pytest.raises(ArgumentError, match="or '20%', got 'much'"):
        parse_size("much", 1000)


@pytest.mark.parametrize(
    ("size", "percent"), [("20", "20"), (" 1000 ", "1000"), ("0.5", "50"), (".5", "50"), ("0.2", "20"), ("1.5", "1.5")]
)
def test_a_bare_number_is_refused_where_a_share_may_be_meant(size, percent):
    with pytest.raises(ArgumentError, match=rf"must have a unit .* write '{percent}%', '{size.strip()}MB' or"):
        parse_size(size, 1000)

    assert parse_size("0", 1000) == 0
    assert parse_size(20, 1000) == 20


def test_more_than_all_rows_is_refused():
    with pytest.raises(ArgumentError, match=r"must be at most 100%, got '101%'"):
        parse_size("101%", 1000)


@pytest.mark.parametrize("size", ["9000000T", f"1{'0' * 400}B"])
def test_more_than_any_memory_is_refused(size):
    with pytest.raises(ArgumentError, match=f"device_cache_size must be less than 2.63 bytes, got '{size}'"):
        parse_size(size)


def test_a_negative_number_is_refused():
    with pytest.raises(ArgumentError, match="must be at least 0, got -1"):
        parse_size(-1)


@pytest.mark.parametrize("size", [0.2, None, True, b"20M", [1]])
def test_other_types_are_refused(size):
    with pytest.raises(ArgumentTypeError, match="must be a number of bytes or a string"):
        parse_size(size)


def test_the_error_names_the_argument_of_the_caller():
    with pytest.raises(ArgumentError, match="feature_cache must be at least 0"):
        parse_size(-1, name="feature_cache")


@pytest.mark.parametrize(
    ("size", "words"),
    [(0.2, r"got 0\.2: write '20%' for a share"), (np.float32(0.5), "write '50%' for a share"),
     (1.0, "write '100%' for a share"), (2e9, "write 2000000000 for bytes"), (float("nan"), "got nan$"),
     (-0.5, r"got -0\.5$"), (True, "got True$"), ([20], r"got \[20\]$")],
)  # fmt: skip
def test_a_fraction_is_refused_with_the_share_that_it_means(size, words):
    with pytest.raises(ArgumentTypeError, match=words):
        parse_size(size, 1000, "feature_cache")


def test_no_share_is_offered_where_none_may_be_given():
    with pytest.raises(ArgumentTypeError, match=r"got 0\.2$"):
        parse_size(0.2, None, "memory")


@pytest.mark.parametrize("size", [1, 20, 100, np.int64(20)])
def test_few_bytes_are_taken_with_a_warning_of_what_was_meant(size):
    with pytest.warns(LoaderWarning, match=f"feature_cache={size} means {size} bytes.* write '{size}%' .*'{size}GB'"):
        check_size(size, "feature_cache")


@pytest.mark.parametrize("size", [0, 101, 1 << 30, "20B", "20%", "0", "64 B"])
def test_sizes_that_may_be_meant_are_taken_in_silence(size):
    check_size(size)


def test_a_share_of_more_than_all_is_taken_where_that_is_sense():
    check_size("200%", "replicas", most=float("inf"))

    assert parse_size("200%", 1000, "replicas", most=float("inf")) == 2000
    with pytest.raises(ArgumentError, match="replicas must be at most 300%, got '301%'"):
        check_size("301%", "replicas", most=300)
