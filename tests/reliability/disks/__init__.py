"""Disks that lose power or are full."""
