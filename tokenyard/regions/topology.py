"""Where regions are, and how long a message takes between them."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from importlib import resources

import numpy as np

from tokenyard.types import FloatArray

KM_PER_S = 200_000.0
"""Light in fibre."""
_EARTH_KM = 6371.0
_SHORTEST_KM = 1e-6

# Cities that stand for the large cloud regions: name, longitude, latitude.
_CONTINENTS = (
    ("virginia", -77.5, 39.0),
    ("oregon", -119.7, 45.8),
    ("sao_paulo", -46.6, -23.5),
    ("frankfurt", 8.7, 50.1),
    ("mumbai", 72.9, 19.1),
    ("tokyo", 139.7, 35.7),
)


@dataclass(frozen=True, eq=False)
class Topology:
    """Regions and the lengths of the shortest paths between them."""

    name: str
    regions: tuple[str, ...]
    path_km: FloatArray
    """Shape (regions, regions), symmetric, zero on the diagonal."""
    day_phase: FloatArray
    """Local time against that of the first meridian as a share of a day, shape (regions,)."""

    @property
    def num_regions(self) -> int:
        """How many there are."""
        return len(self.regions)

    def latency_s(self, mean_s: float | None = None) -> FloatArray:
        """One-way latency between regions, seconds, shape (regions, regions).

        Paths are scaled to a mean off the diagonal; None: geographic, light in fibre along the
        path.
        """
        if mean_s is None:
            return self.path_km / KM_PER_S
        off_diagonal = self.path_km.sum() / (self.num_regions * (self.num_regions - 1))
        return np.asarray(self.path_km * (mean_s / off_diagonal))


@functools.cache
def load_topology(name: str) -> Topology:
    """Find a topology by name.

    Names are `synthetic/continents`, six regions on four continents, `synthetic/gabriel/N/SEED`, a
    random Gabriel graph, and those of the package topohub, such as `sndlib/abilene`.

    Raises:
        ValueError: Unknown, or topohub is not installed.
    """
    if name == "synthetic/continents":
        return _continents()
    drawn = re.fullmatch(r"synthetic/gabriel/(\d+)/(\d+)", name)
    if drawn:
        return _gabriel(name, int(drawn[1]), int(drawn[2]))
    if name.startswith("synthetic/"):
        raise ValueError(
            f"unknown topology {name!r}; choose synthetic/continents or synthetic/gabriel/N/SEED"
        )
    return _from_topohub(name)


def _continents() -> Topology:
    names, longitude, latitude = zip(*_CONTINENTS, strict=True)
    return Topology(
        "synthetic/continents",
        tuple(names),
        _great_circle_km(np.array(longitude), np.array(latitude)),
        np.array(longitude) / 360.0,
    )


def _great_circle_km(longitude: FloatArray, latitude: FloatArray) -> FloatArray:
    """Haversine distances between all pairs of points given in degrees."""
    lon, lat = np.radians(longitude), np.radians(latitude)
    half_lat = np.sin((lat[:, None] - lat) / 2) ** 2
    half_lon = np.sin((lon[:, None] - lon) / 2) ** 2
    chord = half_lat + np.cos(lat[:, None]) * np.cos(lat) * half_lon
    return np.asarray(2 * _EARTH_KM * np.arcsin(np.sqrt(np.clip(chord, 0.0, 1.0))))


def _gabriel(name: str, num_regions: int, seed: int) -> Topology:
    """Link points whose circle holds no third (Gabriel and Sokal 1969); such graphs are connected.

    Raises:
        ValueError: Fewer than two regions.
    """
    if num_regions < 2:
        raise ValueError(f"topology {name!r} must have at least 2 regions")
    points = np.random.default_rng(seed).uniform(0, 500, (num_regions, 2))
    squared = ((points[:, None] - points) ** 2).sum(axis=2)
    # Every pair is tried against every third point: k lies within the circle over i and j when
    # both of its squared distances together are less than theirs.
    i, j, k = np.ogrid[:num_regions, :num_regions, :num_regions]
    through = (squared[:, None, :] + squared[None, :, :]).min(
        axis=2, where=(k != i) & (k != j), initial=np.inf
    )
    linked = (through >= squared) & ~np.eye(num_regions, dtype=bool)
    path_km = _shortest_paths(np.where(linked, np.sqrt(squared), np.inf))
    # The square is taken for 30 degrees wide: two hours between its sides.
    return Topology(
        name, tuple(f"r{i}" for i in range(num_regions)), path_km, points[:, 0] / 500 / 12
    )


def _from_topohub(name: str) -> Topology:
    try:
        files = resources.files("topohub")
    except ImportError:
        raise ValueError(
            f"topology {name!r} comes with the package topohub, which is not installed: "
            "pip install 'tokenyard[train]', or choose synthetic/continents"
        ) from None
    file = files / "data" / f"{name}.json"
    if not file.is_file():
        raise ValueError(f"topohub has no topology {name!r}")
    # Read here: the package's own function leaves the file open.
    graph = json.loads(file.read_text(encoding="utf-8"))
    nodes = graph["nodes"]
    places = np.array([node["pos"] for node in nodes], dtype=np.float64)
    # Gabriel graphs are drawn on a plane of 500 km.
    geographic = not name.startswith("gabriel/")
    if geographic and (np.abs(places) > (180.0, 90.0)).any():
        raise ValueError(
            f"the places of topology {name!r} lie on a plane of no known scale, and topohub's "
            "distances take them for degrees; choose another"
        )
    index = {node["id"]: i for i, node in enumerate(nodes)}
    links = np.full((len(nodes), len(nodes)), np.inf)
    for edge in graph["edges"]:
        i, j = index[edge["source"]], index[edge["target"]]
        # A link of no length would be none.
        links[i, j] = links[j, i] = max(edge["dist"], _SHORTEST_KM)
    path_km = _shortest_paths(links)
    if not np.isfinite(path_km).all():
        raise ValueError(f"topology {name!r} is not connected")
    across = places[:, 0]
    phase = across / 360.0 if geographic else across / 500.0 / 12.0
    return Topology(
        name, tuple(str(node.get("name", node["id"])) for node in nodes), path_km, phase
    )


def _shortest_paths(links: FloatArray) -> FloatArray:
    """Lengths of shortest paths (Floyd and Warshall); infinite links are none, shape (n, n)."""
    paths = links.copy()
    np.fill_diagonal(paths, 0.0)
    for k in range(len(paths)):
        paths = np.minimum(paths, paths[:, k, None] + paths[k])
    return paths
