"""Networks as lists of layers.

Independent of DeepSpeed, of `torch.distributed`, and of all configuration except `ModelConfig`.

Shapes everywhere: `b` micro-batch, `s` sequence, `h` hidden, `a` heads, `d` head size, `f` feed-forward, `v` padded
vocabulary, `t`/`p` tensor- and pipeline-parallel size. A split is written where it happens: `[b, s, h/t]`.
"""
