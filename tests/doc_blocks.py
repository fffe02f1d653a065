"""The code blocks of README.md, SKILL.md and docs/: the commands in them, and what each says that it needs.

A comment directly before a block says how it is tested:

    <!-- needs: hub, time -->       it is not run; its commands are only checked. The words are those of NEEDS
    <!-- run by: tests/FILE.py -->  another test runs it
    <!-- shortened by the test: steps=2 -->  it is run with these settings added to each `mezo train`

A block without one is run (tests/test_docs.py): shell blocks and Python blocks, page by page, in a folder of their own.
A path in backquotes on the line before a fenced block makes it a file in that folder.
"""

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SKILL.md", *(ROOT / "docs").rglob("*.md")])
NEEDS = {
    "hub": "a model or data from the Hugging Face hub",
    "data": "data that are not in this repository",
    "gpu": "a GPU",
    "install": "packages from the network",
    "time": "more time than a test may take",
    "runs": "runs of the reader's own",
}
PROGRAMS = ("mezo", "python", "pip", "make", "pytest", "tensorboard", ".venv/bin/pip", ".venv/bin/python")
MARKER = re.compile(r"<!-- (needs|run by|shortened by the test): (.*?) -->")


@dataclass(frozen=True)
class Block:
    """One block of code.

    Attributes:
        page, line: where it begins.
        language: of a fenced block; "" for one that is indented.
        text: its lines, without the indentation.
        file: the path on the line before it, "" if there is none.
        markers: what the comments before it say: kind -> text.
    """

    page: Path
    line: int
    language: str
    text: str
    file: str = ""
    markers: dict[str, str] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """Return where it stands, for a failure's message."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def is_shell(self) -> bool:
        """Return whether it consists of commands: a block of `sh`, or an indented one that begins with one."""
        return self.language == "sh" or (not self.language and self.text.startswith(tuple(f"{p} " for p in PROGRAMS)))

    @property
    def is_python(self) -> bool:
        """Return whether it is a program (not a file of one)."""
        imports = self.text.startswith(("import ", "from "))
        return not self.file and (self.language == "python" or (not self.language and imports))

    @property
    def is_run(self) -> bool:
        return (self.is_shell or self.is_python) and not {"needs", "run by"} & set(self.markers)

    def commands(self) -> list[str]:
        """Return its commands: continued lines are joined, comments and empty lines are left out."""
        text = re.sub(r"\\\n\s*", "", self.text)
        return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page, fenced or indented, in their order."""
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    i = 0
    while i < len(lines):
        fence = re.match(r"```(\w*)$", lines[i])
        start = i
        if fence:
            end = next(j for j in range(i + 1, len(lines)) if lines[j] == "```")
            body, i = lines[start + 1 : end], end + 1
        elif lines[i].startswith("    ") and _begins(lines, i):
            while i < len(lines) and (lines[i].startswith("    ") or not lines[i].strip()):
                i += 1
            body = [line[4:] for line in lines[start:i]]
        else:
            i += 1
            continue
        before = _lines_before(lines, start)
        name = re.fullmatch(r"`([^`\n]+)`", lines[start - 1]) if fence and start else None
        text = "\n".join(body).rstrip() + "\n"
        found.append(Block(page, start + 1, fence[1] if fence else "", text, name[1] if name else "", before))
    return found


def files(page: Path) -> dict[str, str]:
    """Return the files of a page: path -> text."""
    return {block.file: block.text for block in blocks(page) if block.file}


def inline_commands(page: Path) -> list[str]:
    """Return the commands in backquotes that begin with `mezo` and name at least one argument."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return [command.replace("\\|", "|") for command in re.findall(r"`(mezo \w[^`\n]* [^`\n]+)`", text)]


def words(command: str) -> list[str]:
    """Return the words of a command, without its comment."""
    return shlex.split(command, comments=True)


def _begins(lines: list[str], i: int) -> bool:
    """Return whether an indented line begins a block: it follows an empty line, a heading or a comment, not a list."""
    return i == 0 or not lines[i - 1].strip() or lines[i - 1].startswith(("#", "<!--"))


def _lines_before(lines: list[str], start: int) -> dict[str, str]:
    """Return the markers in the comments directly before a block; empty lines and its file name may be between."""
    markers = {}
    for line in reversed(lines[:start]):
        marker = MARKER.fullmatch(line)
        if marker:
            markers[marker[1]] = marker[2]
        elif line.strip() and not re.fullmatch(r"`([^`\n]+)`", line):
            break
    return markers
