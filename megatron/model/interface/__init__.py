"""What every layer and every network agrees on: descriptions of layers, the context they get, caches, auxiliary losses.

No layer lives here; `blocks/` and the networks are built on it.
"""
