"""dsGPT2's `ds_trainer.py` with its flags, and a script for each of its steps."""
