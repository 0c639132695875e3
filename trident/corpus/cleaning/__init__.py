"""Raw text to cleaner text: repair, filters, duplicates, contamination, and a report of what was dropped and why.

Everything that needs one document alone runs in worker processes on whole blocks; what needs earlier documents
(duplicates) runs in the parent, in order, so the output does not depend on the number of workers. Every optional
library is imported by one file. Imports the rest of `corpus` for reading; is imported by tools only.
"""
