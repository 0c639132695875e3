"""Hosts, disks and networks that this machine only pretends to have, and what crosses them."""
