"""Token ids on disk to batches: file formats, document stores, the order of samples, datasets, and the loader.

NumPy only, plus the optional packages that read Parquet files and databases; no torch and no process groups: a rank is
two integers here. The order of samples is a pure function of its arguments.
"""
