"""The format of a manifest: what is in one, its text, how ranks' files become runs, how it is written and read.

What is needed of a manifest elsewhere is in `checkpoint.manifest`.
"""
