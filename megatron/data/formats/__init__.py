"""Files of token ids: `.bin/.idx` pairs and their sidecars, windows in Parquet files, and files written atomically.

Each format is read and written here and nowhere else. Nothing here knows which sample comes when, or what a training
run is.
"""
