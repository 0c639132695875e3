"""Compressed inputs."""
