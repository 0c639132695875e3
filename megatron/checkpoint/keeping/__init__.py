"""Which checkpoints of a folder stay, and their copies in a second folder.

Works on whole checkpoints that are committed; how one is written or read is not known here.
"""
