"""Texts to try the programs on, without a download: Turkish made by rule, and the English that comes with Python.

Standard library only. `tools/corpus/build_demo_corpus.py` writes them.
"""
