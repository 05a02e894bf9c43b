# SPDX-License-Identifier: Apache-2.0
"""What `make site` does to a document before it is rendered (mkdocs' hooks)."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """In a table GitHub wants `a\\|b` for a bar within code, Python-Markdown a bare one."""

    def bare(line: str) -> str:
        return re.sub("`[^`]*`", lambda code: code[0].replace("\\|", "|"), line)

    lines = markdown.split("\n")
    return "\n".join(bare(line) if line.startswith("|") else line for line in lines)
