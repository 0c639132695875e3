"""A frozen dataclass per section of the configuration; its fields are the flags, its rules are checked on creation.

A section knows only itself. Rules between sections stand in `config/run.py` and `config/request.py`.
"""
