"""Lists that the code must agree with, and the programs that write them."""
