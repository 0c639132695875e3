"""The optimizers themselves: how gradients become updates, on tensors that any layout divides.

Nothing here knows DeepSpeed or the network; `engine/engine.py` tells an optimizer which parts of matrices its flat
tensors hold.
"""
