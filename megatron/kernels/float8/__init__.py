"""Matrix products in eight bits: scales and rounding, and the linear layers made of them."""
