"""Experiments as Python functions, and what a sweep over them records."""
