"""The run: build, step, loop, evaluation, metrics, and the command that starts it."""
