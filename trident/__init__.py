"""The companions of the trainer: what is done before and after a run, and beside it.

`corpus` makes token files, `plan` says what a run will take and walks its ranks, `launch` starts them, `checkpoints`
looks into what they saved, `convert` reads and writes the models of other programs, `evaluate` runs tasks, `serve`
answers over HTTP, and `dashboard` shows runs. Each imports `megatron` and none of the others; `megatron` imports none.
"""
