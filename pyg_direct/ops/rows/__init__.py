"""Row movement, tensors in and tensors out.

`gather_rows.py` reads and writes by id, `graph_rows.py` copies the rows of graphs that lie side by side, and
`batches_of_graphs.py` those of several batches. `upload.py` copies to a GPU.
"""
