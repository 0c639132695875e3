"""What runs do besides training, one callback per file. A file says from the configuration whether a run has it.

`table.py` lists the callbacks in the order in which they are called.
"""
