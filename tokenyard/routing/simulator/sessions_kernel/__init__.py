"""Whole sessions on replicas that batch, in compiled code; `loop.play` plays one stream."""
