"""The scenarios of jax-lm-training."""
