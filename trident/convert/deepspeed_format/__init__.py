"""Checkpoints of DeepSpeed's engines: pipeline layers, files of model-parallel ranks, ZeRO shards, universal folders.

DeepSpeed is not imported: the files are read as they are.
"""
