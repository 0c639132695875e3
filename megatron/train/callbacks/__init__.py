"""What runs do besides training their steps, one callback per file.

Every run reports its steps, evaluates and saves. Of the others, which `table.py` lists in the order in which they are
called, each says from the configuration whether a run has it.
"""
