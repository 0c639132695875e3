"""What becomes of the gradients of a step: summed over its micro-batches, measured and clipped, and used or not.

The code here works on tensors and lists of them and knows no optimizer; `engine/deepspeed_internals/` connects it.
"""
