"""Sampling plans: a multi-hop sample as one sequence of kernels, captured once and replayed for every batch.

- `plan_factory.py`: the plan that serves a topology.
- `uniform_gpu.py`, `uniform_cpu.py`, `hetero_plan.py`, `hgt_sampling.py`, `induced_plan.py`: the plans.
- `sampling_options.py`, `seeds.py`, `random_key.py`, `link_endpoints.py`, `negative_links.py`: inputs of a plan.
- `random_walks.py`: walks over a placed topology.
- `local_ids.py`: local ids of a batch's nodes.
- `graphsage_sampler.py`, `mixed_cpu_gpu.py`: Quiver's samplers.
"""
