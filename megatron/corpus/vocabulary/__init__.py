"""Learning vocabularies from texts, one kind a file, and measuring how well a tokenizer encodes texts.

Using a vocabulary belongs to `tokenizers`.
"""
