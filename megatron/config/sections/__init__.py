"""A frozen dataclass per section of the configuration; its fields are the flags, its rules are checked on creation.

Those of the network and of what is learned are in `config/architecture/` and `config/objective/`. A section knows only
itself. Rules between sections are in `config/run.py` and `config/request_rules.py`.
"""
