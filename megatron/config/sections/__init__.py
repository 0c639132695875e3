"""A frozen dataclass per section of the configuration; its fields are the flags, its rules are checked on creation.

The sections of the network, of what is learned and of the course of a run are in `config/architecture/`,
`config/objective/` and `config/running/`. A section knows only itself. Rules between sections are in `config/run.py`
and `config/request_rules.py`.
"""
