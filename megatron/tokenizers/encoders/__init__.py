"""The fast encoder of byte-level BPE, its equality check against the reference, and encoding of long texts."""
