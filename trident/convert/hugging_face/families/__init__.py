"""One file per family, named by its `model_type`: the table of its fields and tensors, used in both directions."""
