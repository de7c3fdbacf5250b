"""Host: memory, pages, threads and views of tensors.

- `host_memory.py`, `shared_memory.py`: amounts of memory and page policies, and memory across processes.
- `threads.py`: worker threads, and torch's threads; `tensor_views.py`: tensors over foreign memory, and
  items made at the first use.
"""
