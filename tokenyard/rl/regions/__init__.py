"""Regional policies in training: what needs torch or Ray."""
