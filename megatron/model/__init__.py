"""Networks as lists of layers.

Knows no deepspeed, no `torch.distributed` and no configuration other than `ModelConfig`.

Shapes everywhere: `b` micro batch, `s` sequence, `h` hidden, `a` heads, `d` head size, `f` feed-forward, `v` padded
vocabulary, `t`/`p` tensor- and pipeline-parallel size. A split is written where it happens: `[b, s, h/t]`.
"""
