"""Defects that the emulator must find: in kernels written for that, and planted into the sources of csrc/ops."""
