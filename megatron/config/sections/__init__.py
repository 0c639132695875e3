"""Sections of the configuration: frozen dataclasses whose fields are flags and which check themselves on creation.

The sections of the network and of the objective are in `config/architecture/` and `config/objective/`. A section does
not refer to other sections; rules between flags are in `config/rules/`.
"""
