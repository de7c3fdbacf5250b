"""Local ids and compressed rows, tensors in and tensors out: `bitmap.py`, `csr.py` and `relabel.py`."""
