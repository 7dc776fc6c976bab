"""``README.md`` of a run directory or an exported model, in the model-card format of Hugging Face: what the report says, as Markdown."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from safetensors import SafetensorError, safe_open

from emdcfl.core.checks import fits_json
from emdcfl.core.metric import score_of
from emdcfl.core.units import plural, quantity
from emdcfl.report.svg import visible
from emdcfl.runs.served import INPUTS
from emdcfl.runs.verdict.trained_with import origin_in_words

CARD = "README.md"


def card(folder: Path, context: Mapping[str, Any], group: Mapping[str, Any] | None = None) -> str:
    """Return the card of a run directory, from what its report shows; with ``group``, that of one exported model."""
    environment = Environment(loader=PackageLoader("emdcfl.report"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"quantity": quantity, "md": markdown, "yaml": yaml}
    environment.globals |= {"plural": plural}
    summary, encoding = context["summary"], _metadata(folder, "encoding") or {}
    images, numbers = encoding.get("kind") == "images", context["numbers"]
    task = f"{'image' if images else 'tabular'}-{'regression' if numbers else 'classification'}"
    title = context["title"] if group is None else f"{group['title']} of {context['title']}"
    values = {
        **{
            key: context[key] for key in ("summary", "metric", "numbers", "headline", "brief", "worth", "sentences", "clusters", "failures")
        },
        "notes": [_without_folders(note, context["config"]) for note in context["notes"]],
        "facts": [(name, value) for name, value in context["facts"] if name != "time"],  # a resumed run leaves the same card
        "task": task,
        "title": title,
        "name": title,
        "group": group,
        "origin": None if group is None else _origin(summary, group["members"]),
        "classes": _metadata(folder, "classes") or [],
        "label": encoding.get("label"),
        "results": _results(context, group),
        "versions": ", ".join(f"{name} {version}" for name, version in (summary.get("versions") or {}).items()) or "versions unknown",
    }
    text = environment.get_template("card.md").render(values)
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def _without_folders(note: str, config: Mapping[str, Any]) -> str:
    """Return a note without the folders above the data: a card is published, and says nothing of its writer's machine."""
    path = config.get("scenario", {}).get("path")
    above = Path(path).parent if isinstance(path, str) else Path()
    return note if above in (Path(), Path("/")) else note.replace(f"{above}{os.sep}", "")


def _origin(summary: Mapping[str, Any], members: Sequence[str]) -> str | None:
    """Say whose updates the model of some sites holds; None where the run does not know."""
    found = summary.get("trained_with")
    one = next((one for one in found or [] if set(members) <= set(one["serves"])), None)
    return None if one is None else origin_in_words(one)


def _results(context: Mapping[str, Any], group: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return the scores that machines read: means over sites, of the group's own sites where there is one."""
    if group is not None:
        found = [("test", "mean over the sites of the group", group["mean"])]
    else:
        scores = score_of(context["summary"])["variants"]
        found = [(variant, "mean over sites", score.get("mean")) for variant, score in scores.items()]
    return [{"split": split, "name": name, "value": value} for split, name, value in found if value is not None]


def _metadata(folder: Path, key: str) -> Any:
    """Return one entry of the metadata of a run's models; none where there are no models yet, or they are damaged."""
    path = min((folder / "models").glob("*.safetensors"), default=None)
    if path is None:
        return None
    try:
        with safe_open(path, framework="pt") as file:
            value = json.loads((file.metadata() or {})[key])
            return value if fits_json(value, INPUTS[key]) else None
    except (OSError, ValueError, KeyError, RecursionError, SafetensorError):
        return None


def markdown(text: object) -> str:
    r"""Return text that Markdown shows as it is.

    Examples
    --------
    >>> print(markdown("a|b <i> [x](y) `z`"))
    a\|b \<i\> \[x\](y) \`z\`
    """
    return re.sub(r"([\\`*_\[\]<>|#~!$&])", r"\\\1", visible(text))


def yaml(text: object) -> str:
    """Return a quoted string of YAML, of which JSON's are a part."""
    return json.dumps(visible(text), ensure_ascii=True)
