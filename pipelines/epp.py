"""Pick endpoints for Envoy and the Gateway API Inference Extension, until Ctrl-C."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
import uvloop
from pydantic import ValidationError

from serve_app.app import GatewayOptions, check_local_admin, find_cluster
from serve_app.process import serve_until_told
from tokenyard.config import sentence_of
from tokenyard.provenance import ResultFile, command_line, write_result


@dataclass(frozen=True)
class Args:
    """Where the endpoints are, who decides, and where Envoy asks."""

    cluster: str
    """YAML path of the cluster: its pools are of endpoints, and Envoy reaches these."""
    policy: str | None = None
    """champion, a policy file (.npz) or a rule's name; None: the cluster's, or champion."""
    host: str = "127.0.0.1"
    """Address where Envoy asks; 0.0.0.0 for all."""
    port: int = 9002
    """Port where Envoy asks."""
    http_host: str = "127.0.0.1"
    """Address of the HTTP port."""
    http_port: int = 9003
    """Port of /metrics, /v1/policy, /v1/pools and the page, as those of a gateway."""
    decision_log: Path | None = None
    """Folder that gets Parquet files with a row per decision."""
    json: ResultFile | None = None
    """File that gets a row about where it listens, as soon as it does."""


def main(args: Args) -> None:
    """Start, say where, and serve."""
    try:
        options = GatewayOptions(
            cluster=args.cluster, policy=args.policy, host=args.http_host, port=args.http_port,
            decision_log=args.decision_log,
        )  # fmt: skip
        check_local_admin(options)
        cluster = find_cluster(options)
        if cluster.needs_ray or cluster.decide_only:
            raise ValueError(f"cluster {args.cluster}: Envoy reaches endpoints only; name a pool")
        serving = serve_until_told(
            cluster, options, lambda: _report(args, cluster.policy), (args.host, args.port)
        )
        uvloop.run(serving)
    except (ValueError, OSError) as error:
        text = sentence_of(error) if isinstance(error, ValidationError) else str(error)
        sys.exit(f"error: {' '.join(text.split())}")


def _report(args: Args, policy: str) -> None:
    url = f"http://{args.http_host}:{args.http_port}"
    print(
        f"picking by {policy} on {args.host}:{args.port} (gRPC, for Envoy); "
        f"metrics and changes on {url}",
        flush=True,
    )
    row = {"policy": policy, "grpc": f"{args.host}:{args.port}", "url": url}
    write_result(args.json, command_line(), None, [row])


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
