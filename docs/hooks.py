"""What MkDocs takes from outside of docs/: the page of results with its figures. Links that lead out of the site lose their link."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
CARDS = ROOT / "model_cards"
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages and every figure."""
    for name, source in (("results.md", "RESULTS.md"), ("controllable_mappings.md", "controllable_mappings.md")):
        files.append(File.generated(config, name, content=_inside((CARDS / source).read_text(encoding="utf-8"))))
    for figure in sorted((CARDS / "figures").iterdir()):
        files.append(File.generated(config, f"figures/{figure.name}", abs_src_path=str(figure)))
    return files


def _inside(text: str) -> str:
    def link(found: re.Match[str]) -> str:
        picture, words, target = found.groups()
        if target.startswith(("http", "#", "figures/")) or picture:
            return found[0]
        page = target.partition("#")[0]
        if page in ("RESULTS.md", "controllable_mappings.md"):
            return f"[{words}]({target.replace('RESULTS.md', 'results.md')})"
        return words

    return _LINK.sub(link, text)
