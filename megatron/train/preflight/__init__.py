"""Checks before torch is imported: flags, files, packages, and the launcher's environment variables.

Nothing here starts, builds or writes anything, imports torch, or refuses what could work. `train/build.py` later checks
everything that depends on the machine, the tokenizer or other ranks.
"""
