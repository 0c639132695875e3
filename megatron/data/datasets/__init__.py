"""Datasets: map a sample's index to arrays of token ids.

Token files, rows, masked samples, examples, and blends of them. Prefixes are resolved in `sources/`; batches and ranks
belong to `data/loader.py`.
"""
