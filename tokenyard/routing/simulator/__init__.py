"""Simulators of the servers that requests are routed to."""
