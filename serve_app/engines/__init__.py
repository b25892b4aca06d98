"""Inference engines: one small interface, and what implements it.

Reading order: `base` (the interface), `admission` (what every engine refuses), `models` (what is
loaded, and whether it can be divided), `tokenizer`, `sharded` (ranks as Ray actors), `emulation`
(held to the pace of hardware that is not there) and `vllm`.
"""
