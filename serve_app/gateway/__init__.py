"""The path of a request: admitted, placed, sent, retried, counted and logged.

Reading order: `generation` (what goes to a replica and comes back), `replicas` (what is known of
them), `backends` (where they are), `gateway` (the path itself), `metrics`, `history` and
`decision_log` (what is kept of it).
"""
