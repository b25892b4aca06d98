"""Inference engines: one small interface, and what implements it.

Reading order: `base` (the interface), `requests` (what every engine refuses), `models` (what is
loaded, and whether it can be divided), `gang` (ranks as Ray actors), `rank` (what each of them
does), `sampling`, `vllm` and `profile` (how fast an engine is).
"""
