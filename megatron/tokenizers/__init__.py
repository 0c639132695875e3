"""Tokenizers: text to token ids and back.

One small protocol and the function that builds a tokenizer from the flags (`tokenizer.py`), one family of tokenizers
per file, the faster encoder with its check that it gives the same ids, and texts too long to encode at once. Token
files belong to `data`, learning a vocabulary to `corpus/vocabulary`. No torch; an optional library is imported by the
one file that owns it.
"""
