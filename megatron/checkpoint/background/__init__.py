"""Checkpoints written beside training: the copy in host memory, whether it fits there, and the thread that writes it.

Decides nothing about when to save or what a failure means; that is the training loop's.
"""
