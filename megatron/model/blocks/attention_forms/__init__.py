"""How queries attend to keys, one form per file; which forms a network has is chosen when it is built."""
