"""Learning to route: RLlib algorithms, their networks, and the way from training to an artifact.

The only part of the core that knows torch and Ray. Reading order: `recipes` (what is trained and
how), `modules` (the networks), `a2c` (the algorithm that RLlib lacks), `export` (network to
artifact), `trainable` (one trial of a sweep).
"""
