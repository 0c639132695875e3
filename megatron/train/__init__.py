"""The training program: wiring, the loop, what is reported, and when to stop."""
