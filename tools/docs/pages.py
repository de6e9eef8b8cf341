"""What the site needs beyond ``docs/``: the README as its first page, CONTRIBUTING, the licence, a list of decisions.

The law: a page is written once, for a reader of the repository. Here its links are turned to where the site has their
targets; words stay as they are. mkdocs calls the functions whose names begin with ``on_``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from mkdocs.structure.files import File, Files

ROOT: Final = Path(__file__).parents[2]
_FROM_ROOT: Final = {"index.md": "README.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "LICENSE": "LICENSE"}
"""Files of the site, and what they are in the repository."""
_LINK: Final = re.compile(r"\]\(([^)#\s]+)")


def on_config(config: Any) -> Any:
    """Put every decision into the navigation, in its order."""
    (section,) = (entry for entry in config.nav if isinstance(entry, dict) and "Decisions" in entry)
    section["Decisions"] = ["decisions/index.md", *(f"decisions/{page.name}" for page in _decisions())]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in ``docs/``."""
    for name, source in _FROM_ROOT.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
    titles = [(page.name, page.read_text().partition("\n")[0].removeprefix("# ")) for page in _decisions()]
    listed = "\n".join(f"- [{title}]({name})" for name, title in titles)
    files.append(File.generated(config, "decisions/index.md", content=f"# Decisions\n\n{listed}\n"))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links of the repository into links of the site."""
    if page.file.src_uri in _FROM_ROOT:
        return _LINK.sub(lambda link: f"]({_from_root(link[1])}", markdown)
    return markdown.replace("](../README.md", "](index.md").replace("](../CONTRIBUTING.md", "](CONTRIBUTING.md")


def _from_root(target: str) -> str:
    target = target.removeprefix("docs/")
    return "decisions/index.md" if target == "decisions/" else target


def _decisions() -> list[Path]:
    return sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
