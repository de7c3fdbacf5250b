"""Discrete-time dynamic graphs: sequences of snapshots, aggregated several at a time (PiPAD, PPoPP 2023)."""
