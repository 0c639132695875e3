"""Everything that is measured on one NVIDIA GPU, with one command, in parts that are each bounded in time.

    bash benchmarks/gpu/run.sh --wheels FOLDER --output FOLDER

Nothing is downloaded: tokens are drawn on the spot, and what the machine lacks comes as wheels (`wheels.py` collects
them elsewhere). Each part is a process of its own, whose figures are on disk as soon as they are known.
"""
