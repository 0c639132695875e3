"""3D-parallel GPT pretraining on PyTorch and DeepSpeed.

Rooms, from the left: `errors`, `device`, `log` < `config` < `kernels` < `data` < `corpus` < `parallel` < `model` <
`engine` < `checkpoint` < `train` | `inference`. A room imports only rooms to its left; nothing here runs at import.
"""

__version__ = "0.1.0"
