"""Input of the corpus tools: files, databases and hub datasets, cut into blocks, and the documents in a block.

What `--input` names, decompression, lines of JSON, Parquet rows and plain text, with the place of every bad document.
Nothing here encodes or filters a document.
"""
