"""The command lines of the programs in the root that have flags of their own, one file a program.

Each is a dataclass of flags whose method `words` gives the trainer's command line; nothing here trains or builds.
"""
