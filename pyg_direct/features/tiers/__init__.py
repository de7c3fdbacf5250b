"""Tiers: rows of tables behind the `Tier` contract of `base.py`, on disk (`disk.py`) or in shards (`sharded.py`)."""
