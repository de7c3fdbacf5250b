"""Sampling plans: a multi-hop sample as one sequence of kernels, captured once and replayed for every batch.

- `captured_plan.py`: parts that captured plans share, and results on their way.
- `uniform_plan.py`: plans of one node type and uniform draws, on CPUs and GPUs, and the plan that serves a topology.
- `induced_plan.py`: edges among sets of nodes.
- `hetero_plan.py`, `hetero_gpu.py`, `hgt_sampling.py`: plans with types, times and weights; `hetero_sample.py`: their
  samples.
- `sampling_options.py`, `seeds.py`, `random_key.py`: inputs of a plan.
- `negative_links.py`: negative links, and negative edges of whole graphs, under PyG's arguments.
- `random_walks.py`: walks over a placed topology, and nodes that walks from seeds are at most often.
- `local_ids.py`: local ids of a batch's nodes.
- `graphsage_sampler.py`: Quiver's samplers.
"""
