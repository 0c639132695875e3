"""Prompts with answers and conversations as training rows: files of JSON records, and stores with two columns.

Records become messages (`records.py`), a chat template turns messages into ids once, in a memory-mapped cache
(`tokenized_examples.py`), and examples become rows, one or several per row (`example_rows.py`).
"""
