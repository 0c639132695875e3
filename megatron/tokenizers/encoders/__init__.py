"""The fast encoder of byte-level BPE, its guard of equality with the reference, and texts too long to encode whole."""
