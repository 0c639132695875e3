"""The interface of layers and networks: descriptions of layers, their context, caches and auxiliary losses.

No layer lives here; `blocks/` and the networks are built on it.
"""
