"""A loaded checkpoint as a model of EleutherAI's lm-evaluation-harness (`pip install lm-eval`), which is optional.

Only `adapter.py` imports the package, and only when a model is asked for.
"""
