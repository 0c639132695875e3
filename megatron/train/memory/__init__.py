"""Measures the memory of training in small runs on data drawn at random."""
