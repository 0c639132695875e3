"""Datasets: the number of a sample to its arrays of token ids.

Token files, rows, masked samples, examples, and blends of them. What a prefix names is in `sources/`; batches and ranks
belong to `data/loader.py`.
"""
