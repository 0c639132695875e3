"""Starts the ranks of a run on this machine, on hosts reached with `ssh`, or on the nodes of a Slurm job.

Reads host lists and host files, checks the layout of the run before anything starts, builds the command of every node
and supervises the processes. `megatron.parallel` reads the variables that a rank is started with.
"""
