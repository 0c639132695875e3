"""Bytes of parameters, gradients and optimizer states on a rank: predicted in closed form, and measured."""
