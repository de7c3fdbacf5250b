"""Row movement, tensors in and tensors out: `gather_rows.py` reads and writes by id, `upload.py` copies to a GPU."""
