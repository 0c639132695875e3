"""The built-in callbacks, one per file.

Every run has step reports, evaluation and saving. The others are listed in `table.py` in the order of their calls; each
decides by the configuration whether a run needs it.
"""
