"""Flags made from typed fields: their declaration, the sections they form, and the command line they are read from."""
