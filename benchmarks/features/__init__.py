"""Rows: on disk, shared or sharded between processes, and how hot ones are chosen."""
