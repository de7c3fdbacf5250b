"""CUDA graphs of models and steps, and the padded batches that they take.

- `graphed_step.py`: whole training steps; `model_replay.py`: the passes of a model within an unchanged loop.
- `model_call.py`: the arguments of a pass; `graphs_call.py`: those of a batch of small graphs.
- `recorded_passes.py`: recordings of passes, and those over whole graphs; `batch_passes.py`: those over batches;
  `graph_passes.py`: those over batches of small graphs.
- `recorded_step.py`: recordings of steps, also of frames of snapshots.
- `padded_batch.py`: batches of one layout; `padded_graphs.py`: batches of small graphs in the same layout.
- `guards.py`: the conditions under which a pass may be replayed.
"""
