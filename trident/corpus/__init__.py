"""Raw text to token files: inputs, preprocessing, featurizing, vocabularies, document stores and cleaning.

Never imported by training; imports `data` for the file formats and `tokenizers`, and no torch.
"""
