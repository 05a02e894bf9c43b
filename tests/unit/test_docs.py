# SPDX-License-Identifier: Apache-2.0
"""The documents: what they link to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from paths import ROOT

DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def anchors(path: Path) -> set[str]:
    """Of a document's headings, as GitHub and mkdocs make them."""
    heads = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_links_to_is_there(document: Path) -> None:
    for match in re.finditer(r"\]\(([^)#\s]+)?(?:#([^)\s]*))?\)", document.read_text()):
        name, anchor = match[1], match[2]
        if name and name.startswith(("http://", "https://")):
            continue
        target = document.parent / name if name else document
        assert target.exists(), match[0]
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), match[0]


@pytest.mark.parametrize(
    "document", [*DOCUMENTS, ROOT / "packaging" / "README.md"], ids=lambda path: str(path.name)
)
def test_what_is_used_of_dist_is_made_before(document: Path) -> None:
    """Who copies the lines in their order has it."""
    before, used, _ = document.read_text().partition("dist/")
    assert not used or "make release" in before


def test_each_document_is_listed() -> None:
    listed = (ROOT / "docs" / "README.md").read_text()
    names = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert {name for name in names if f"({name})" not in listed} == set()
    site = (ROOT / "tools" / "mkdocs.yml").read_text()
    assert {name for name in names if name not in site} == set()
