"""Worker processes of the corpus tools, the pipes to them, the progress line, and jobs that run on several ranks.

Knows nothing of what a job does with a block: encoding and cleaning hand in their own work.
"""
