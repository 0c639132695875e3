"""The gradients of a step: accumulation over micro-batches, averaging, clipping, and the decision to update.

Independent of the optimizer; `engine/deepspeed_internals/` connects it.
"""
