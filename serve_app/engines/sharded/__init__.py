"""An engine of several processes that share a model, over transformers' continuous batching.

Reading order: `messages` (what ranks and engine tell each other), `engine` (ranks as Ray actors),
`rank` (what each of them does), `attention`, `packing` and `sampling` (its inner loop).
"""
