"""The dashboard: a local web page that shows the runs of some folders while they train.

Reads what runs write and writes nothing; needs neither torch nor a network, so that it starts at once anywhere. What is
in `page/` is sent to the browser unchanged; `curves/` plots and compares runs for programs of `tools/`.
"""
