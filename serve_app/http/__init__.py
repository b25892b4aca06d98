"""The HTTP surface.

Reading order: `api` (the application), `openai` (OpenAI's routes), `decide` (`/v1/route`), `admin`
(policy, experiments, pools, metrics), `allocation`; `auth` and `errors` hold for all of them, and
the bodies are in the modules that end in `_schema`.
"""
