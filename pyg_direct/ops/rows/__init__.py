"""Row movement, tensors in and tensors out.

`gather_rows.py` reads and writes by id, `graph_rows.py` copies the rows of graphs that lie side by side, of one
batch or of several. `upload.py` copies to a GPU.
"""
