"""Where the command `tokenyard` begins; `python -m tokenyard VERB` is the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp


def main() -> None:
    """Run the command that the first argument names."""
    from pipelines.cli import main

    main()


def create_mlflow_app() -> ASGIApp:
    """Make what `mlflow server --app-name=tokenyard` serves."""
    from tune_configs.mlflow_server import create_app

    return create_app()


if __name__ == "__main__":
    main()
