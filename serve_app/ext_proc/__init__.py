"""Envoy's external processing service: the gateway's picks for proxies that carry the bytes."""
