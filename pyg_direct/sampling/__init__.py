"""Sampling plans: a multi-hop sample as one sequence of kernels, captured once and replayed for every batch.

- `plan_factory.py`: the plan that serves a topology.
- `uniform_gpu.py`, `uniform_cpu.py`, `hetero_plan.py`, `hgt_sampling.py`: the plans.
- `recipe.py`, `seeds.py`, `random_key.py`, `link_ends.py`, `negative_links.py`: inputs of a plan.
- `local_ids.py`: local ids of a batch's nodes.
- `graphsage.py`, `mixed_cpu_gpu.py`: Quiver's samplers.
"""
