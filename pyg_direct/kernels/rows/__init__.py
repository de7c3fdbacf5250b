"""Kernels that move rows of tables: `gather.py` for tables in memory, and `file_rows.py` for files."""
