"""Programs that run unedited: PyG's loaders make ours, its models are accelerated."""
