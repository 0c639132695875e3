"""What is trained for: from outputs and targets of a micro-batch to a loss sum, counted tokens and named metrics.

Objectives know batches and tensors; nothing of the engine, of pipeline stages or of micro-batch counts.
"""
