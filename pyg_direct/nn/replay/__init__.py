"""CUDA graphs of models and steps, and the padded batches that they take.

- `graphed_step.py`: whole training steps, also of frames of snapshots; `model_replay.py`: the passes of a model within
  an unchanged loop.
- `model_call.py`: the arguments of a pass.
- `recorded_passes.py`: recordings of passes, and those over whole graphs; `batch_passes.py`: those over batches.
- `padded_batch.py`: batches of one layout.
- `guards.py`: the conditions under which a pass may be replayed; `host_reads.py`: numbers that it reads on the host.
"""
