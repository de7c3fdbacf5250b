"""Kernels that move rows of tables: `gather.py` for tables in memory, and `file_ranges.py` for files.

`fresh_rows.py` lists the rows that a planned batch claims first.

`objects.py` prefetches Python's objects.
"""
