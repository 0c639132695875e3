"""Random combinations of networks, layouts, schedules, ZeRO stages and optimizers, each against one process."""
