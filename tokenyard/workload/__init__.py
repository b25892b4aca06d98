"""Workload: traces, their readers, the synthetic generator fitted to them, request features.

Reading order: `trace`, `readers`, `model`, `fit`, `features`, `statistics`.
"""
