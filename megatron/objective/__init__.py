"""Training objectives: map outputs and targets of a micro-batch to a loss sum, counted tokens and named metrics.

Objectives see batches and tensors; they are independent of the engine, pipeline stages and micro-batch counts.
"""
