"""Clustering on arrays: pure functions that know nothing of clients, models or methods."""

from __future__ import annotations

from emdcfl.clustering.labels import adjusted_rand, match_labels, members_of
from emdcfl.clustering.neighbourhoods import completed, joined, links, neighbourhoods
from emdcfl.clustering.pairs import Link, Margins, PairRatios, margins
from emdcfl.clustering.partitions import bipartition, cut, edc, first_gap, gram_features, kmeans, merges

__all__ = [
    "Link",
    "Margins",
    "PairRatios",
    "adjusted_rand",
    "bipartition",
    "completed",
    "cut",
    "edc",
    "first_gap",
    "gram_features",
    "joined",
    "kmeans",
    "links",
    "margins",
    "match_labels",
    "members_of",
    "merges",
    "neighbourhoods",
]
