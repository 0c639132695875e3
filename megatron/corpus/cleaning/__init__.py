"""Raw text to cleaner text: repair, filters, duplicates, contamination, and a report of what was dropped and why.

Everything that looks at one document runs in worker processes on whole blocks; what must know earlier documents
(duplicates) runs in the parent, in order, so the output does not depend on the number of workers. Every optional
library is imported by one file. Imports the rest of `corpus` for reading; is imported by tools only.
"""
