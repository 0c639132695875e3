"""Raw text to `.bin/.idx`: sources, encoding and the policies for bad input.

Never imported by training; imports `data` for the file formats and the tokenizers, and no torch.
"""
