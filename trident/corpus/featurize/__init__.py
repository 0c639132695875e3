"""Featurizing: converts documents or a `.bin/.idx` pair to windows of equal length in Parquet shards, and back.

The columns and the metadata of a shard belong to `data/formats/parquet_windows.py`.
"""
