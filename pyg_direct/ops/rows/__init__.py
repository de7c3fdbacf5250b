"""Row movement, tensors in and tensors out.

`gather_rows.py` reads and writes by id, `graph_rows.py` copies the rows of graphs that lie side by side, and
`upload.py` copies to a GPU. `prefetch_objects.py` prepares reads of many tensors as Python's objects.
"""
