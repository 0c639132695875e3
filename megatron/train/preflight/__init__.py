"""Checks before torch is imported: flags, files, packages, and the launcher's environment variables.

Nothing here starts, builds or writes anything, or imports torch. `train/build.py` later checks everything that depends
on the machine, the tokenizer or other ranks.
"""
