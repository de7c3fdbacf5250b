"""Mini-batches, sampled and fetched ahead while the model trains on the last one."""
