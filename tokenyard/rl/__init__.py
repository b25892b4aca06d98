"""Learning to decide: RLlib algorithms, policy search, and the way from either to an artifact.

The only part of the core that knows torch and Ray. Reading order: `algorithms` and `modules` (what
all problems train, and the networks), `columnar` (who samples and learns), `training` (one
interface over RLlib and what learns in its own process), `trainable` (one trial of a sweep), then a
problem, such as `routing`: `training` (what is trained and how), `trial` (what a trial is made of).
"""
