"""Make an API key: `python pipelines/keys.py new --tenant search --name search-1`.

It prints the key, which stands nowhere else, and the entry for the file that a cluster file names
by `gateway: {keys: FILE}`. That file holds hashes alone.
"""

from __future__ import annotations

import secrets
import sys
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro
import yaml
from pydantic import ValidationError

from serve_app.gateway.callers import UNLIMITED, ApiKey, CallerLimits, KeysMessage, hash_of
from tokenyard.config import sentence_of
from tokenyard.provenance import ResultFile, command_line, write_result

_PREFIX = "sk-ty-"
"""So that scanners of repositories find keys that were committed."""
_NUM_BYTES = 32


@dataclass(frozen=True)
class Args:
    """Make an API key, and print it once with its entry for the file of keys."""

    action: Annotated[Literal["new"], tyro.conf.Positional]
    """new: draw a key."""
    name: str
    """Whom logs name; no two keys of a file have the same."""
    tenant: str | None = None
    """Whose requests are counted together; an admin's key needs none."""
    admin: bool = False
    """Make a key that changes what is served, and asks no models."""
    autopilot: bool = False
    """Make a key for `tokenyard autopilot`: it changes policies, and nothing else."""
    limits: CallerLimits = UNLIMITED
    """What it may ask for; None: as much as there is."""
    models: tuple[str, ...] = ()
    """Models that it may ask; none: all."""
    json: ResultFile | None = None
    """Write the entry to this file as a result row, without the key."""


def main(args: Args) -> None:
    key = _PREFIX + secrets.token_urlsafe(_NUM_BYTES)
    try:
        entry_key = ApiKey(
            name=args.name, sha256=hash_of(key), tenant=args.tenant, admin=args.admin,
            autopilot=args.autopilot, models=args.models or None, limits=args.limits,
        )  # fmt: skip
        KeysMessage(keys=(entry_key,))
    except ValidationError as error:
        sys.exit(f"keys: {sentence_of(error)}")
    entry = entry_key.model_dump(mode="json", exclude_defaults=True)
    text = yaml.safe_dump([entry], sort_keys=False, default_flow_style=None, width=1000)
    print(f"key, shown only now: {key}\n\nunder `keys:` in the file of keys:\n\n{text}", end="")
    write_result(args.json, command_line(), None, [entry])


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
