"""The two versions of the manifest: as text, checked, and as one value that is the same for both.

What is needed of a manifest elsewhere is in `checkpoint.manifest`.
"""
