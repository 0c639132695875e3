"""Pipeline schedules: generated, simulated and read from files.

Pure Python, without torch; `megatron/engine/pipeline/` executes the programs.
"""
