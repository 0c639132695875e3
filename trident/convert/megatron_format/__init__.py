"""Checkpoints of Megatron-LM and its forks: their names, orders of rows, arguments, and files, in both directions.

DeepSpeed's files hold the same tensors under the same names, so `deepspeed_format` builds on this.
"""
