"""Whole sessions: which are held at the gateway, where they go on, whose KV memory is kept."""
