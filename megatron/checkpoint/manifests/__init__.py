"""The format of a manifest: contents, text, compaction of files into runs, writing and reading.

Other modules use `checkpoint.manifest`.
"""
