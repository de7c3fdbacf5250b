"""Local ids and compressed rows, tensors in and tensors out: `build_csr.py` and `relabel_nodes.py`."""
