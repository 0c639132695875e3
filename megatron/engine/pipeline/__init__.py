"""Pipeline parallelism: the division of layers into chunks, and the execution of schedules.

The schedules are built in `megatron/parallel/schedule/`.
"""
