"""Copying the folder of a run to another place, here or on another machine, while the run may be writing to it."""
