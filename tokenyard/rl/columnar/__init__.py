"""RLlib's sampling and learning over columns instead of episodes."""
