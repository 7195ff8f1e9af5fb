"""Pages that need no network: one file with its styles and scripts, which its policy allows by their hashes."""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from collections.abc import Mapping
from importlib.resources import files


def page_file(name: str, package: str = "shardc.report.dump") -> str:
    """The text of a file in the folder ``page`` of a package."""
    return files(package).joinpath("page", name).read_text(encoding="utf-8")


def filled(template: str, contents: Mapping[str, str]) -> str:
    """The template with each ``{{name}}`` replaced by its content."""
    return re.sub(r"{{(\w+)}}", lambda field: contents[field[1]], template)


def hash_of(text: str) -> str:
    """The name of an inline script or style in a content security policy."""
    return f"sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
