"""Topology at rest: `CSRTopo` and the ways to make one."""
