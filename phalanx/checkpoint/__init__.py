"""Checkpoints: the state of a training run on disk, complete or not there at all."""
