"""Forward and backward passes of micro-batches without a pipeline, and their loss.

The passes of a pipeline are in `megatron/engine/pipeline/`.
"""
