"""A frozen dataclass per section of the configuration; its fields are the flags, its rules are checked on creation.

A section knows only itself. Rules between sections are in `config/run.py` and `config/request_rules.py`.
"""
