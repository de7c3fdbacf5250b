"""Communication between processes.

- `communicator.py`, `formation.py`: the ordered channel of a group, and how the group and its sockets form over
  Gloo.
- `host_group.py`: objects shared by the processes of a host.
- `heartbeat.py`: the processes that are alive.
- `nccl_segments.py`: exchanges of NCCL that CUDA graphs capture.
"""
