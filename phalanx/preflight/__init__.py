"""Compiling a step for devices that one does not have, and saying what would happen there."""
