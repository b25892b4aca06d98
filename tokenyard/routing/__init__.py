"""Routing: which replica serves a request."""
