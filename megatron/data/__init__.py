"""Token ids on disk to batches: file formats, document stores, the order of samples, datasets, and the loader.

NumPy only, and the optional packages that read Parquet files and databases; no torch. A rank is two integers here, and
there are no process groups. The order of samples is a pure function of its arguments.
"""
