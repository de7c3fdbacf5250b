"""Communication between processes.

- `communicator.py`, `formation.py`: the ordered channel of a group, and how the group forms over Gloo.
- `gloo_sockets.py`: the loopback and connections; `host_group.py`: objects shared by the processes of a host.
- `heartbeat.py`: the processes that are alive.
- `nccl_segments.py`: exchanges of NCCL that CUDA graphs capture.
"""
