"""Servers that hold the parts of a graph for clients.

- `part_server.py`, `client_graph.py`: the server of one part, and the graph on a client without parts.
- `ray_servers.py`: servers as Ray actors.
- `client_connections.py`, `local_channel.py`: large answers between hosts, and requests within one host.
"""
