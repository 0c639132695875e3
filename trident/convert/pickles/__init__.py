"""Reads pickled files of other programs without executing them, in a child process with resource limits.

`reader` is the interface. The modules that the child imports (`unpickler`, `containers`, `child`) require only the
standard library, so that it starts quickly and stays small.
"""
