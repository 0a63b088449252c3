"""Every script of the gallery runs, and checks its own claims.

`make test` runs the scripts that need nothing beyond the extras `bench` and `test` and end within
seconds; `make gallery` runs all of them.
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted((ROOT / "examples").glob("plot_*.py"))
FAST = {"plot_gw170814.py"}


def marked(path: Path):
    marks = [] if path.name in FAST else [pytest.mark.gallery]
    return pytest.param(path, id=path.stem, marks=marks)


@pytest.mark.parametrize("path", [marked(path) for path in SCRIPTS])
def test_script(path):
    environment = os.environ | {"MPLBACKEND": "Agg"}
    command = [sys.executable, "-W", "default", str(path)]
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    print(ended.stdout, ended.stderr, sep="\n")
    assert ended.returncode == 0, ended.stderr
    # Other packages may warn of each other; nothing may warn of the lines of the script.
    warnings = re.findall(rf"{re.escape(path.name)}:\d+: \w*Warning.*", ended.stderr)
    assert not warnings


def test_every_script_has_a_title():
    """sphinx-gallery takes title and introduction from the docstring."""
    for path in sorted((ROOT / "examples").glob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        title, line = docstring.splitlines()[:2]
        assert set(line) == {"="}, f"{path.name} has no underlined title"
        assert len(line) >= len(title)
