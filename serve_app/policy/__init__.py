"""The life of a policy: found, warmed up, asked, guarded, compared, promoted.

Reading order: `loading` (which policy a name means), `runner` (one policy behind its circuit
breaker), `timeouts`, `experiment` (shadow and canary), `picker` (who decides), `manager` (what
changes that), `champion_alias` (how the registry follows), `state` (what survives a crash).
"""
