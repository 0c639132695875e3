"""The training program: wiring, the loop, evaluation, saving, resuming, and when to stop."""
