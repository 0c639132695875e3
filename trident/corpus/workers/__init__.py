"""Worker processes of the corpus tools, the pipes to them, the progress line, and jobs that run on several ranks.

Independent of the work on a block, which encoding and cleaning pass in.
"""
