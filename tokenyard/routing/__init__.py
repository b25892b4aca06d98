"""Which replica serves a request: the first of the three problems.

Read `problem` first, then `evaluation` (what is measured) and `validation` (what training sees).
"""
