"""Cleaning of raw text: repair, filters, duplicates, contamination, and a report of dropped documents with reasons.

All work on single documents runs in worker processes on whole blocks; deduplication runs in the parent, in order, so
the output does not depend on the number of workers. Every optional library is imported by one file. Imports the rest of
`corpus` for reading; imported by tools only.
"""
