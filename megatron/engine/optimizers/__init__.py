"""The optimizers, on tensors that any layout may partition.

Independent of DeepSpeed and of the network; `OptimizerPlan.connect` describes the parts of matrices in flat tensors.
"""
