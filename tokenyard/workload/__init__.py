"""Workload: traces, their readers, the synthetic generator fitted to them, request features.

Reading order: `trace`, `readers` (with `locations` and `download`), `model` (with `sampling` and
`diurnal`), `fit`, `features`, `statistics`.
"""
