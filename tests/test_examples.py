"""The examples as a user runs them, and the demo's checks, failures and picture."""

import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cp_prefill
import numpy as np
import pytest
import torch
import torch.distributed as dist
from cp_prefill_checks import Check, swapped_keys
from cp_prefill_steps import Settings
from hf_reference import IndexerCall, attentions_of, recorded_indexers, small_model
from matplotlib import image as image_file
from mooncake_cluster import running_cluster
from rich.progress import Progress
from selection_map import map_image

EXAMPLES = Path(__file__).parents[1] / "examples"
CHECK = Check("prefill", 512, 0, 2, 1.0, 0.0, 0.1, 0.2, True)


def run(script: str, *arguments: object, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def test_op_by_hand() -> None:
    result = run("op_by_hand.py")
    assert result.returncode == 0, result.stderr
    assert "[3, 16, 512]" in result.stdout
    # e4m3's noise of 0.0255 in values and as much again through the weights.
    assert float(result.stdout.rsplit(":", 1)[1]) < 2 * 0.0255


def test_compile_layer() -> None:
    result = run("compile_layer.py")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line.split(":")[0].strip() for line in lines] == ["300 tokens", "17 tokens", "512 tokens", "100 tokens"]
    assert "2 graphs so far" in lines[-1]
    # Nothing is fused, so that compiled and eager layers do the same operations.
    assert all(float(line.rsplit(" ", 1)[1]) < 1e-6 for line in lines)


def test_decode() -> None:
    result = run("decode.py")
    assert result.returncode == 0, result.stderr
    assert "536 tokens in, 12 out" in result.stdout
    assert "512 of 548 tokens were cached" in result.stdout


def check_prefill_decode(url: str) -> None:
    """Bit-equal pages, each stored by one rank only, and the continuation of one process: the example checks it."""
    result = run("prefill_decode.py", "--store", url, "--steps", 6)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "loaded [304, 96, 16] tokens" in result.stdout
    shares = re.search(r"which stored (\d+) \+ (\d+) pages", result.stdout)
    assert shares is not None
    assert sum(map(int, shares.groups())) == 21  # 19 + 2: the second prompt's pages are the first's
    assert min(map(int, shares.groups())) > 0
    assert "bit for bit" in result.stdout


def test_prefill_decode(tmp_path: Path) -> None:
    check_prefill_decode(f"file://{tmp_path}/store?memory=64MiB")
    assert len(list(tmp_path.glob("store/??/*.page"))) == 21


@pytest.mark.mooncake
def test_prefill_decode_through_mooncake(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as cluster:
        check_prefill_decode(cluster.url("64MiB"))


def test_demo(tmp_path: Path) -> None:
    """On a text of one's own, the other split, and small: more than 4 * topk keys, two layers, two ranks."""
    text, picture = tmp_path / "mine.txt", tmp_path / "map.png"
    text.write_bytes(bytes(range(32, 127)) * 5)
    arguments = ("--tokens", 320, "--layers", 2, "--topk", 64, "--decode", 3, "--split", "interleave")
    result = run("cp_prefill.py", "--text", text, "--output", picture, *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    for step in ("prefill", "prefix reuse", "decode x 3", "T <= topk", "unquantised"):
        (row,) = [line for line in result.stdout.splitlines() if line.strip().startswith(step + "  ")]
        cells = row.split()
        assert cells[-1] == "yes"
        assert float(cells[-4]) <= 1e-9
        assert float(cells[-3]) <= float(cells[-2])
        assert cells[-6] == "2"
    assert "mine.txt" in result.stdout
    pixels = image_file.imread(picture)
    assert min(pixels.shape[:2]) > 1000
    for colour in ("0072B2", "D55E00"):  # of both ranks
        wanted = np.array([int(colour[i : i + 2], 16) for i in (0, 2, 4)]) / 255
        assert (np.abs(pixels[..., :3] - wanted).max(axis=-1) < 0.02).any()


def test_demo_help_names_all_options() -> None:
    result = run("cp_prefill.py", "--help")
    assert result.returncode == 0
    for option in ("--text", "--ranks", "--split", "--tokens", "--topk", "--layers", "--decode", "--output"):
        assert option in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "1"], "--ranks: expected at least 2, got 1"),
        (["--topk", "100"], "--topk: expected a multiple of 64, got 100"),
        (["--tokens", "300", "--topk", "128"], "--tokens: expected at least 512, got 300"),
        (["--decode", "0"], "--decode: expected at least 1, got 0"),
        (["--split", "blocks"], "--split"),
    ],
)
def test_demo_refuses_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cp_prefill.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_demo_refuses_a_text_that_is_too_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "short.txt"
    text.write_text("too short")
    assert cp_prefill.main(["--text", str(text)]) == 2
    assert "short.txt: expected at least 1536 bytes" in capsys.readouterr().out


@pytest.mark.parametrize(
    "changes",
    [
        {"to_one_process": 1e-8},
        {"to_one_process": float("nan")},
        {"to_transformers": 0.3},
        {"to_transformers": float("nan")},
        {"same_picks": False},
        {"beyond_fp8": 1e-3},
    ],
)
def test_demo_fails_if_one_difference_is_over_its_bound(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert CHECK.ok
    for name, result in (("run_ranks", ([], [])), ("run_steps", ([], [])), ("draw_selection_map", None)):
        monkeypatch.setattr(cp_prefill, name, lambda *_, result=result: result)
    for checks, status in (([CHECK, CHECK], 0), ([CHECK, replace(CHECK, **changes)], 1)):
        monkeypatch.setattr(cp_prefill, "check_steps", lambda *_, checks=checks: checks)
        assert cp_prefill.main(["--output", str(tmp_path / "map.png")]) == status
    assert "NO" in capsys.readouterr().out


@dataclass(frozen=True)
class FailsOnOneRank(Settings):
    """The other rank is in its first gather by then."""

    def model(self) -> Any:
        if dist.get_rank() == 1:
            raise RuntimeError("no model on this rank")
        return super().model()


def test_a_rank_that_fails_ends_the_demo_with_its_traceback() -> None:
    prompts = {name: list(range(100)) for name in ("first", "second", "short", "plain")}
    with Progress(disable=True) as bars, pytest.raises(Exception, match="no model on this rank"):
        cp_prefill.run_ranks(FailsOnOneRank(prompts, 2, 64, 1, "zigzag", 2), bars)


def test_swapped_keys_are_found_and_judged_by_their_scores() -> None:
    model = small_model("deepseek_v32", num_hidden_layers=1)
    tokens = torch.randint(256, (1, 100), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), recorded_indexers(attentions_of(model)) as calls:
        model(tokens)
    call: IndexerCall = calls[0]
    visible = call.picks <= torch.arange(100)[:, None]
    picks = torch.where(visible, call.picks, -1)
    assert swapped_keys(picks, call) == (0, 0.0)
    # The exact scores select the same keys as transformers' fp32 ones.
    scores = call.scores().masked_fill(torch.ones(100, 100).triu(1).bool(), -torch.inf)
    assert set(scores[99].topk(64).indices.tolist()) == set(picks[99].tolist())
    worst, best = scores[99].argmin(), scores[99].argmax()
    picks[99] = torch.where(picks[99] == best, worst, picks[99])
    rows, gap = swapped_keys(picks, call)
    assert rows == 1
    assert gap == pytest.approx(float((scores[99, best] - scores[99, worst]) / call.scores()[99].abs().max()))


def test_the_map_has_the_colour_of_each_pair_s_row() -> None:
    selected = np.array([[1, 0, 0], [1, 0, 0], [0, 1, 1]], dtype=np.float32)
    colours = np.array([[1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0]])
    image = map_image(selected, colours)
    assert image.shape == (3, 3, 3)
    for row, key in ((0, 0), (1, 0), (2, 1), (2, 2)):
        assert (image[row, key] == colours[row]).all()
    assert (image[0, 1:] == 1).all()
    assert (image[1, 2] == 1).all()
    pale = image[2, 0]
    assert (pale < 1).all()
    assert (pale > 0.9).all()
