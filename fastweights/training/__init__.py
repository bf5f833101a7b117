"""Training: state, step, optimiser, loss, checkpoints, metrics and the run folder."""
