"""Servers that hold the parts of a graph for clients.

- `part_server.py`, `client_graph.py`: the server of one part, and the graph on a client without parts.
- `ray_servers.py`: servers as Ray actors.
- `local_channel.py`: requests within one host.
"""
