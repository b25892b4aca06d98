"""The performance model against NVIDIA's step times: `python -m benchmarks.step_times`.

Reading order: `export` (runs in the wheel's environment), `__main__` (errors, fit, tables),
`figure`.
"""
