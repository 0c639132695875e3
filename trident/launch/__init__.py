"""Starting the ranks of a run: on this machine, on hosts that `ssh` reaches, or on the nodes of a Slurm job.

Reads host lists and host files, checks the layout of the run before anything starts, makes the command of every node,
and watches what was started. What a rank does with the variables that it is given is in `megatron.parallel`.
"""
