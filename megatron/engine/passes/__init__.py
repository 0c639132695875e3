"""Forward and backward passes of the micro-batches of a global batch: their loss, and those of one process.

The passes of a pipeline are in `megatron/engine/pipeline/`.
"""
