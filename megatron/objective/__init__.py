"""Training objectives: from outputs and targets of a micro-batch to a loss sum, counted tokens and named metrics.

They use batches and tensors, but not the engine, pipeline stages or the number of micro-batches.
"""
