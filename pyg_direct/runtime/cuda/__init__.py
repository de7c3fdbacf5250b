"""CUDA driver: devices, memory, streams, launches, captured graphs and peers.

- `device.py`, `launch.py`: driver calls, device choice, kernel launches and streams.
- `memory.py`, `peer_memory.py`: placement of arrays, and memory across several GPUs.
- `graph_capture.py`: CUDA graphs, and the share of multiprocessors.
"""
