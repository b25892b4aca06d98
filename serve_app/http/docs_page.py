"""`/docs`: the API on one self-contained page."""

from __future__ import annotations

import html
import json
from typing import Any


def documentation(schema: dict[str, Any]) -> str:
    """Return an OpenAPI schema as one self-contained page."""
    parts = [f"<h1>{html.escape(schema['info']['title'])}</h1>"]
    parts.append("<p>Machine-readable: <a href='/openapi.json'>/openapi.json</a></p>")
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<h2><code>{method.upper()} {html.escape(path)}</code></h2>")
            parts.append(f"<p>{html.escape(operation.get('description', ''))}</p>")
            body = operation.get("requestBody", {}).get("content", {}).get("application/json")
            if body is not None:
                parts.append(f"<p>Body: {_reference(body['schema'])}</p>")
            statuses = ", ".join(sorted(operation["responses"]))
            parts.append(f"<p>Answers: {html.escape(statuses)}</p>")
    parts.append("<h1>Bodies</h1>")
    for name, model in sorted(schema.get("components", {}).get("schemas", {}).items()):
        parts.append(f"<h3 id='{html.escape(name)}'>{html.escape(name)}</h3>")
        text = html.escape(json.dumps(model, indent=1))
        parts.append(f"<details><summary>schema</summary><pre>{text}</pre></details>")
    style = "body{font:16px/1.5 system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    return (
        f"<!doctype html><meta charset='utf-8'><title>API</title><style>{style}</style>"
        + "\n".join(parts)
    )


def _reference(schema: dict[str, Any]) -> str:
    name = html.escape(schema.get("$ref", "").rpartition("/")[2])
    return f"<a href='#{name}'>{name}</a>" if name else html.escape(json.dumps(schema))
