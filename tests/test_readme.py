"""The README's example is run as it stands."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_example_runs_and_prints_the_shapes_it_names() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    result = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "[100, 16, 512]" in result.stdout
    assert "[100, 16]" in result.stdout
