"""What runs do besides training, one part per file. A file says from the configuration whether a run has its part.

`table.py` lists the parts in the order in which they are called.
"""
