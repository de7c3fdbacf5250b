"""Rows: on disk, shared or sharded between processes, and the choice of hot rows."""
