"""Optimizer states and their updates: precision, place and moment."""
