"""MkDocs hooks: pages that live outside docs/ become part of the site, and links between both kinds are rewritten."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
PAGES = {
    "REPRODUCTION.md": "explanation/reproduction.md",
    "CHANGELOG.md": "reference/changelog.md",
    "CONTRIBUTING.md": "how-to/contribute.md",
    "README.md": "index.md",
}
"""Where pages of the repository's root stand in the site; README.md is replaced by the site's own index."""
LINK = re.compile(r"(!?\[[^\]\n]*\]\()([^)\s#]+)(#[^)\s]*)?(\))")


def site_path(path: str) -> str | None:
    """The place in the site of a file of the repository; None if it has none."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.startswith("benchmarks/"):
        return f"results/{path}"
    return PAGES.get(path)


def repository_path(path: str) -> str:
    """The file of the repository behind a place in the site."""
    known = {site: page for page, site in PAGES.items() if page != "README.md"}
    if path.startswith("results/benchmarks/"):
        return path.removeprefix("results/")
    return known.get(path, f"docs/{path}")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the root, those of the benchmarks and their pictures."""
    added = [page for page in PAGES if page != "README.md"]
    for pattern in ("benchmarks/*.md", "benchmarks/results/*.png"):
        added += [str(path.relative_to(ROOT)) for path in ROOT.glob(pattern)]
    for page in added:
        files.append(File.generated(config, str(site_path(page)), abs_src_path=str(ROOT / page)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point relative links at the site's pages; a link to a file that the site lacks becomes plain text."""
    here = repository_path(page.file.src_uri)

    def rewrite(match: re.Match[str]) -> str:
        start, target, anchor, end = match.groups()
        if re.match(r"[a-z]+:", target):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
        place = site_path(path)
        if place is None or not (ROOT / path).is_file():
            return start.lstrip("!")[1:-2]
        relative = posixpath.relpath(place, posixpath.dirname(page.file.src_uri) or ".")
        return f"{start}{relative}{anchor or ''}{end}"

    return LINK.sub(rewrite, markdown)
