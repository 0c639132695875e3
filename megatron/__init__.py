"""3D-parallel GPT pretraining on PyTorch and DeepSpeed.

Packages in import order: `files`, `config`, `kernels`, `tokenizers`, `data`, `parallel`, `model`, `objective`,
`engine`, `checkpoint`, `observe`, `train` and `inference`; the modules beside them come before `config`. A package
imports only earlier ones, and nothing of `trident`, the companions of the trainer; importing this one runs nothing.
"""

__version__ = "0.1.0"
