"""Routing: each request to one of a cluster's servers."""
