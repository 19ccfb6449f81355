"""The pages of documentation, and the blocks of code in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text("utf-8")
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
}


class Block(NamedTuple):
    """Lines between two fences; ``language`` is what follows the first."""

    page: str
    language: str
    code: str

    @property
    def program(self) -> str:
        """What a reader runs, of a diff what the file is afterwards; on CPU, and in processes that live on."""
        code = self.code
        if self.language == "diff":
            code = "".join(line[1:] or "\n" for line in code.splitlines(keepends=True) if not line.startswith("-"))
        return code.replace('"cuda"', '"cpu"').replace("torch.distributed.destroy_process_group()\n", "")


def blocks(*languages: str) -> list[Block]:
    """All blocks of these languages, in order."""
    return [
        Block(page, language, code)
        for page, text in PAGES.items()
        for language, code in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.S | re.M)
        if language in languages
    ]


def commands() -> list[list[str]]:
    """The words of every command in the pages, without what the shell adds to them."""
    lines = [line for block in blocks("") for line in block.code.replace("\\\n", " ").splitlines()]
    return [line.split("#")[0].split() for line in lines if re.match(r"(\S*torchrun|\S*python|pip|make) ", line)]
