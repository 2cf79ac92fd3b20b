"""The documents can be followed: links, paths and commands exist, and the README's example runs as it stands."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from sparse_cp_ops.__main__ import make_parser

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(
    [ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]
)
every_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def test_example_runs_and_prints_the_shapes_it_names() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    result = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "[100, 16, 512]" in result.stdout
    assert "[100, 16]" in result.stdout


@every_document
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", document.read_text()):
        assert target.startswith("https://") or (document.parent / target.split("#")[0]).exists(), target


@every_document
def test_paths_exist(document: Path) -> None:
    """Paths of this repository; `<op>`, `*` and "..." stand for several."""
    paths = re.findall(r"`((?:csrc|sparse_cp_ops|tests|benchmarks|examples|docs)/[^` ]*)`", document.read_text())
    for path in paths:
        assert list(ROOT.glob(re.sub(r"<\w+>", "*", path).rstrip("/"))), path


def commands(document: Path) -> list[list[str]]:
    """Words of the commands in code spans and blocks; what is optional is there."""
    text = document.read_text()
    spans = re.findall(r"`([^`\n]+(?:\n[^`\n]+)?)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    blocks = "\n".join(re.findall(r"```\n(.*?)```", text, re.DOTALL)).splitlines()
    lines = [line for line in [*spans, *blocks] if re.match(r"(\w+=\S+ )?(python|make) ", line)]
    return [shlex.split(re.sub(r"[\[\]]", "", line), comments=True) for line in lines]


def test_commands_are_found() -> None:
    found = [" ".join(words) for document in DOCUMENTS for words in commands(document)]
    assert {"make demo", "make test", "python -m sparse_cp_ops", "python benchmarks/cpu.py"} <= set(found)


@every_document
def test_commands_exist(document: Path) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for words in commands(document):
        if words[0] == "make":
            assert next(word for word in words[1:] if "=" not in word) in targets, words
        if words[:3] == ["python", "-m", "sparse_cp_ops"]:
            make_parser().parse_args(words[3:])
        elif "python" in words:
            script = ROOT / words[words.index("python") + 1]
            assert script.is_file(), words
            for option in (word for word in words if word.startswith("--")):
                assert f'"{option}"' in script.read_text(), words
