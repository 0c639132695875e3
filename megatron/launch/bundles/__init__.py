"""One file with the compiled modules of a start (`--bundle`): `making` writes it, `running` runs a program from it.

`running` imports nothing of this package, which it would have to read from its files.
"""
