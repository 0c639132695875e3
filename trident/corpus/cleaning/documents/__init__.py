"""Documents in cleaning: the options of a run, entries with their original lines, words, and repair.

Nothing here drops documents.
"""
