"""Preprocessing: documents to published `.bin/.idx` pairs.

Encoding, merging, resuming by partitions, several ranks on one corpus, provenance, and the check of a finished pair.
The byte layout of the files belongs to `data/formats`.
"""
