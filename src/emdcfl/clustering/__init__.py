"""Clustering on arrays: pure functions that know nothing of clients, models or methods. Imports numpy, scipy and scikit-learn only."""

from __future__ import annotations

from emdcfl.clustering.agreement import Link, Margins, adjusted_rand, margins
from emdcfl.clustering.kmeans import kmeans
from emdcfl.clustering.linkage import LINKAGES, bipartition, cut
from emdcfl.clustering.matching import match_labels
from emdcfl.clustering.neighbourhoods import components, joined, links, neighbourhoods, per_pair
from emdcfl.clustering.simplex import project_simplex
from emdcfl.clustering.spectral import edc, gram_features

__all__ = [
    "LINKAGES",
    "Link",
    "Margins",
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
