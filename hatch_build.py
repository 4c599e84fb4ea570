"""The README and the addresses that the package index shows.

The address of the repository is only in `pyproject.toml`. While it is empty, links
to files of the repository, which would lead nowhere, are shown as plain text, and
pictures are left out.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(
    r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<path>(?!https?://|mailto:|#)[^)\s]+)\)"
)
_CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def with_links(text: str, files: str | None) -> str:
    """README with links to `files` in place of those to files of the repository; plain text if
    `files` is None.
    """

    def link(match: re.Match[str]) -> str:
        picture = match["picture"]
        if files is None:
            return "" if picture else match["text"]
        place = files.replace("/blob/", "/raw/") if picture else files
        return f"{picture}[{match['text']}]({place}/{match['path']})"

    # Every second part is code, in which nothing is a link.
    parts = _CODE.split(text)
    parts[::2] = [_LINK.sub(link, part) for part in parts[::2]]
    return "".join(parts)


class Metadata(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        address = self.config["address"].rstrip("/")
        files = f"{address}/blob/v{metadata['version']}" if address else None
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": with_links(text, files)}
        metadata["urls"] = {}
        if address:
            metadata["urls"] = {
                "Repository": address,
                "Issues": f"{address}/issues",
                "Changelog": f"{files}/CHANGELOG.md",
            }
