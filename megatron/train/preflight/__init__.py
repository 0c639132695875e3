"""What is refused before torch is imported: everything that flags, files, packages and the launcher's variables reveal.

Nothing here starts, builds or writes anything, imports torch, or refuses what could work; what only the machine, the
tokenizer or the other ranks reveal is refused later, by `train/build.py`.
"""
