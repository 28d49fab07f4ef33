"""Strategies: one program for one device or a thousand."""
