"""Models by their public names: which pools serve them, and how long texts may be."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.cluster import Cluster, ExternalPool, Pool


@dataclass(frozen=True)
class ServedModel:
    """A model, or an adapter of one, with its public name."""

    name: str
    parent: str | None
    """Model that it adapts; None: it is no adapter."""
    own: tuple[Pool, ...]
    """Pools of ours that serve it, the template of an allocated one included."""
    has_endpoints: bool
    """Whether endpoints serve it, too."""
    others: frozenset[str]
    """Pools of the cluster's file that do not."""
    is_allocated: bool
    """Whether the pools of a plan do, whose names are in no file."""
    in_file: frozenset[str]
    """All pools of the file."""

    def is_served_by(self, pool: str) -> bool:
        """Whether a pool of that name serves it."""
        return pool not in self.others and (self.is_allocated or pool in self.in_file)


class ModelCatalog:
    """The models of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.default = cluster.served_model
        """Name of what a request gets that names none."""
        bases = [cluster.model_of(pool) for pool in (*cluster.pools, *cluster.templates)]
        self.models = {name: _served(cluster, name, None) for name in dict.fromkeys(bases)}
        """Models by name, adapters last."""
        for pool in cluster.external_pools:
            for name in pool.loras:
                self.models[name] = _served(cluster, name, cluster.model_of(pool))

    def find(self, name: str | None) -> ServedModel | None:
        """Return the model of a name, or the cluster's own for None; None: it is not served."""
        return self.models.get(self.default if name is None else name)

    def refusal(self, name: str) -> str:
        """Return the error for a model that is not served."""
        names = ", ".join(map(repr, self.models))
        are = "is" if len(self.models) == 1 else "are"
        return f"model {name!r} is not served here; {names} {are}"


def _served(cluster: Cluster, name: str, parent: str | None) -> ServedModel:
    def serves(pool: Pool | ExternalPool) -> bool:
        if parent is None:
            return cluster.model_of(pool) == name
        return isinstance(pool, ExternalPool) and name in pool.loras

    pools = [pool for pool in (*cluster.pools, *cluster.templates) if serves(pool)]
    own = tuple(pool for pool in pools if isinstance(pool, Pool))
    return ServedModel(
        name, parent, own, len(own) < len(pools),
        frozenset(pool.name for pool in cluster.pools if not serves(pool)),
        not cluster.templates or any(map(serves, cluster.templates)),
        frozenset(pool.name for pool in cluster.pools),
    )  # fmt: skip
