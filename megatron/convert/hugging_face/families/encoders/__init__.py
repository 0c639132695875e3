"""Families of encoders: attention in both directions, and heads for masked tokens."""
