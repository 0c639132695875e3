"""Input of the corpus tools: files, databases and Hub datasets, cut into blocks, and the documents in a block.

Values of `--input`, decompression, lines of JSON, Parquet rows and plain text, with the location of every bad document.
Nothing here encodes or filters a document.
"""
