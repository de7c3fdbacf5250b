"""Snapshots and frames, beside PyTorch Geometric Temporal and PiPAD's published figures."""
