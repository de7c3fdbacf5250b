"""Servers that hold the parts of a graph for clients.

- `part_server.py`, `client_graph.py`: one part that answers, and the graph as a client without parts sees it.
- `ray_servers.py`: servers as Ray actors.
- `client_connections.py`, `local_channel.py`: large answers between hosts, and requests within one host.
"""
