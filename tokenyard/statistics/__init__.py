"""Intervals, tests and estimates that every problem shares."""
