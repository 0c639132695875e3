"""Checkpoint formats of Megatron-LM and its forks: names, row orders, arguments and files.

DeepSpeed's files contain the same tensors with the same names, so `deepspeed_format` builds on this package.
"""
