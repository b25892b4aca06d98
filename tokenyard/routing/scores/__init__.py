"""Costs of sending a request to each replica; lower is better."""
