"""File formats for token ids: `.bin/.idx` pairs with their sidecars, and windows in Parquet files.

Each format is read and written here and nowhere else. Nothing here depends on sample order or training runs.
"""
