"""What a GPU has to show, in parts: `python -m benchmarks.gpu PART.. --out FOLDER`.

Reading order: `__main__` (the parts), `shapes` (models), `cells` (resumable tables), `grid` over
`llama` (torch alone), `rank_engine` (a rank without Ray), `equality`, `fleet` over `carrier` and
`engine_process`, `summary`.
"""
