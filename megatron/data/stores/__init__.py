"""Document stores: documents in a SQLite or MongoDB database, read by index.

Addresses are in `address.py`, the interface of a database in `backend.py`, and each database has a file. This package
only reads; `trident/corpus/stores` imports documents. Texts are returned as they are; the caller tokenizes them.
"""
