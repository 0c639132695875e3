"""Prompts with answers and conversations as training rows: files of JSON records, and stores with two columns.

Records become messages (`records.py`), messages become ids by a chat template, once, into a cache that is mapped
(`tokenized_examples.py`), and examples become rows, one or several in each (`example_rows.py`).
"""
