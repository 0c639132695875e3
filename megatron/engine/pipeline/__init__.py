"""Pipeline parallelism: which layers a rank holds, and the passes of micro-batches through the ranks.

The order of the passes is a schedule of `megatron/parallel/schedule/`; here it is executed.
"""
