"""Tokenizers: text to token ids and back.

A protocol and the function that builds a tokenizer from the flags (`tokenizer.py`), one family of tokenizers per file,
the fast encoder with its equality check, and texts too long to encode at once. Token files belong to `data`, training
of vocabularies to `trident/corpus/vocabulary`. No torch; each optional library is imported by a single file.
"""
