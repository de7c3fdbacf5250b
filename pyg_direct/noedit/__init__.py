"""Programs that run unedited: PyG's loaders replaced under their own names, its models accelerated."""
