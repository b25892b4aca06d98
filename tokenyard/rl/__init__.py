"""Learning to route: RLlib algorithms, policy search, and the way from either to an artifact.

The only part of the core that knows torch and Ray. Reading order: `recipes` (what is trained and
how), `modules` (the networks), `a2c` (the algorithm that RLlib lacks), `runner` (who samples),
`training` (one interface over RLlib and direct search), `export` (network to artifact),
`trainable` (one trial of a sweep), `routing.trial` (what a trial is made from).
"""
