"""Worker processes of the corpus tools, the pipes to them, the progress line, and jobs that run on several ranks.

Does not depend on what is done with a block: encoding and cleaning pass in their own work.
"""
