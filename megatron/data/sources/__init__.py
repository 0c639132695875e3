"""Data sources, one class per kind: token files, pairs, Parquet windows, document stores, examples.

No torch and no ranks here.
"""
