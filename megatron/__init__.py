"""3D-parallel GPT pretraining on PyTorch and DeepSpeed.

Packages in import order: `errors`, `log`, `device`, `config`, `kernels`, `tokenizers`, `data`, `parallel`, `model`,
`objective`, `engine`, `checkpoint`, `observe`, `evaluation`, `train` and `inference`. A package imports only earlier
ones, and nothing of `trident`, the companions of the trainer; importing this one runs nothing.
"""

__version__ = "0.1.0"
