"""Inference engines: one small interface, and what implements it."""
