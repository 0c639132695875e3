"""What a family's table is made of: rules for fields, rules for tensors, and the family that holds them."""
