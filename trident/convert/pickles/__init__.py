"""Reads pickled files of other programs without executing them, in a child process with limits.

`reader` is for callers. The modules that the child imports (`unpickler`, `containers`, `child`) need the standard
library only, so that it starts quickly and stays small.
"""
