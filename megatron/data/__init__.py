"""Token files, Parquet windows and document stores to batches of token ids.

NumPy only, and the optional packages that read the latter two. Knows no ranks except as two integers, and no process
groups; the order of samples is a pure function of its arguments.
"""
