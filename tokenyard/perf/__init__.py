"""How fast a sharded LLM replica is, how much it holds, and what power it draws: a closed form.

Start with `replica` (what is described), `iteration` (how long one forward pass takes) and
`serving` (what follows for prompts and tokens). `coefficients` puts an iteration into four
numbers for simulators; `calibration` fits the free parameters to measurements.
"""
