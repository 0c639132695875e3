"""Layout-free, pickle-free checkpoints: any layout writes, any layout reads.

Knows pieces of tensors and files; nothing of DeepSpeed and nothing of the training loop.
"""
