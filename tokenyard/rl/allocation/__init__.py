"""Allocators in training: what needs torch or Ray."""
