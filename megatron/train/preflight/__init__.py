"""What is refused before torch is imported: all that flags, files, packages and the launcher's variables tell.

Nothing here starts, builds or writes anything, imports torch, or refuses what could work; what only the machine, the
tokenizer or the other ranks can tell is refused later, by `train/build.py`.
"""
