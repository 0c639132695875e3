"""Documents as cleaning sees them: the options of a run, entries with the lines they came from, words, and repair.

Nothing here decides whether a document is kept.
"""
