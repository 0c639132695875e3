"""Training of vocabularies, one kind per file, and evaluation of tokenizers.

Encoding belongs to `megatron/tokenizers`.
"""
