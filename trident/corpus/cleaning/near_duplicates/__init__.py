"""Near duplicates: MinHash signatures, and their index.

`cleaning/duplicates.py` decides which documents are kept.
"""
