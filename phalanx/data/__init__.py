"""Feeding: rows of a source to the replicas."""
