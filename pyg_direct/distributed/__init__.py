"""Graphs over several processes and machines: partitions on disk, exchange of frontiers and rows, loaders over both."""
