"""Document stores: documents in a SQLite or MongoDB database, read by number.

How a store is named (`address.py`), what a database must be able to do (`backend.py`), and one database per file. Reads
only: documents get into a store through `corpus/stores`. Texts stay texts here; tokenizing them is up to the caller.
"""
