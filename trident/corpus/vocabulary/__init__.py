"""Learning vocabularies from texts, one kind per file, and measuring how well a tokenizer encodes texts.

Using a vocabulary belongs to `tokenizers`.
"""
