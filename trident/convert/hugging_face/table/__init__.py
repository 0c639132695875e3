"""Components of a family's table: rules for fields and tensors, and the family itself."""
