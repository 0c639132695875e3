"""The dashboard: a local web page that shows runs while they train.

Only reads the files of runs, and requires neither torch nor a network, so that it starts immediately. The files in
`page/` are sent to the browser unchanged; `curves/` plots and compares runs for programs of `tools/`.
"""
