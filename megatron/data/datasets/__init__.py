"""Data sets: the number of a sample to its arrays of token ids.

One kind of data set a file (token files, Parquet windows, document stores, blends of them), and `build.py`, which makes
the training, validation and test data sets of a run from its flags. Batches and ranks belong to `data/loader.py`.
"""
