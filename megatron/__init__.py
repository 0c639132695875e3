"""3D-parallel GPT pretraining on PyTorch and DeepSpeed.

Packages in import order: `errors`, `log`, `device`, `config`, `kernels`, `tokenizers`, `data`, `corpus`, `parallel`,
`model`, `objective`, `engine`, `checkpoint`, `observe`, `train` and `inference`. A package imports only earlier ones;
importing this one runs nothing.
"""

__version__ = "0.1.0"
