"""The lines of memory that rows are read by, where they begin beside lines."""

import pytest

from benchmarks.features.unified import count_line_requests


@pytest.mark.parametrize("access_bytes", [128, 512])
def test_aligned_rows_ask_for_each_line_once(access_bytes):
    counts = [count_line_requests(2048, access_bytes, is_shifted=shifted) for shifted in (False, True)]

    assert counts == [16, 16]


def test_accesses_that_begin_with_the_row_ask_for_lines_twice():
    # Rows of 192 bytes begin at 0 and 64 of a line: bytes 0-127 and 128-191, then 64-191 and 192-255.
    counts = [count_line_requests(192, 128, is_shifted=shifted) for shifted in (False, True)]

    assert counts == [(2 + 3) / 2, (2 + 2) / 2]


@pytest.mark.parametrize("row_bytes", range(2048, 2080, 4))
@pytest.mark.parametrize("access_bytes", [128, 512])
def test_shifted_accesses_ask_for_the_lines_of_the_row(row_bytes, access_bytes):
    begins = range(0, 128 * row_bytes, row_bytes)
    lines = sum(len({byte // 128 for byte in range(begin, begin + row_bytes)}) for begin in begins) / 128

    assert count_line_requests(row_bytes, access_bytes, is_shifted=True) == lines
    assert count_line_requests(row_bytes, access_bytes, is_shifted=False) >= lines
