"""A frozen dataclass per section of the configuration; its fields are the flags, its rules are checked on creation.

The sections of the network and of what is learned are in `config/architecture/` and `config/objective/`. A section
knows only itself. Rules between flags are in `config/rules/`.
"""
