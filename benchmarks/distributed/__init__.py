"""Graphs in parts, servers, and several GPUs of a host."""
