"""Bytes of parameters, gradients and optimizer states on a rank: what the ZeRO stages promise, and what is held.

Nothing here changes an engine.
"""
