"""Clustering on arrays: pure functions that know nothing of clients, models or methods."""

from __future__ import annotations

from emdcfl.clustering.labels import adjusted_rand, match_labels
from emdcfl.clustering.margins import Link, Margins, margins
from emdcfl.clustering.neighbourhoods import components, joined, links, neighbourhoods, per_pair
from emdcfl.clustering.pairs import PairRatios
from emdcfl.clustering.partitions import LINKAGES, bipartition, cut, kmeans
from emdcfl.clustering.simplex import project_simplex
from emdcfl.clustering.spectral import edc, gram_features

__all__ = [
    "LINKAGES",
    "Link",
    "Margins",
    "PairRatios",
    "adjusted_rand",
    "bipartition",
    "components",
    "cut",
    "edc",
    "gram_features",
    "joined",
    "kmeans",
    "links",
    "margins",
    "match_labels",
    "neighbourhoods",
    "per_pair",
    "project_simplex",
]
