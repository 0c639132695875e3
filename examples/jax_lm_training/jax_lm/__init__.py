"""jax-lm-training's two programs under their own names: `python -m jax_lm.preprocess` and `python -m jax_lm.train`."""
