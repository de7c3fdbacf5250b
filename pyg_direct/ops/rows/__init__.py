"""Row movement, tensors in and tensors out: `gather.py`, `multi_gather.py`, `scatter.py` and `upload.py`."""
