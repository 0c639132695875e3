"""Pipeline schedules: which rank runs which part of which micro-batch next; generated, simulated and read.

Pure Python: nothing here knows torch, processes or a network. `megatron/engine/pipeline/` executes the programs.
"""
