"""Every example in its short form, as a user would start it; what they print and write is checked, not only that they end."""

import importlib.util
import inspect
import json
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


def run(name: str, *arguments: str, cwd: pathlib.Path) -> str:
    """What the example prints."""
    command = [sys.executable, "-W", "error", EXAMPLES / f"{name}.py", "--short", *arguments]
    finished = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr[-4000:]
    return finished.stdout


def test_train_gpt(tmp_path):
    printed = run("train_gpt", cwd=tmp_path)
    out = tmp_path / "out" / "train_gpt"
    assert sorted(path.name for path in out.iterdir()) == ["attention.png", "loss.png", "metrics.json"]
    for path in out.glob("*.png"):
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    metrics = json.loads((out / "metrics.json").read_text())
    (_, before), *_, (steps, after) = metrics["validation"]
    assert steps == len(metrics["losses"]) == metrics["config"]["steps"]
    assert abs(before - np.log(256)) < 0.5  # it begins by guessing bytes
    assert after < before - 2
    assert f"-> {after:.3f} nats" in printed
    assert len(metrics["sample"]) > 0
    memory = {row["attention"]: row["temporary_bytes"] for row in metrics["comparison"]}
    assert 0 < memory["flash"] < memory["jax_xla"]
    assert all(row["milliseconds"] > 0 for row in metrics["comparison"])


def test_train_gpt_with_options(tmp_path):
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question. " * 200)
    printed = run(
        "train_gpt", "--text", "text.txt", "--attention", "jax_xla", "--remat", "--steps", "2", "--compare", "--out", ".", cwd=tmp_path
    )
    assert "attention: jax.nn (xla)" in printed
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert len(metrics["losses"]) == 2
    assert "comparison" not in metrics
    assert metrics["config"]["remat"] is True


def test_text_is_split_without_overlap(tmp_path):
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLES / "train_gpt.py")
    assert spec is not None
    assert spec.loader is not None
    train_gpt = importlib.util.module_from_spec(spec)
    sys.modules["train_gpt"] = train_gpt  # dataclasses look their module up
    spec.loader.exec_module(train_gpt)
    for n in range(40):
        (tmp_path / f"{n:02d}.txt").write_bytes(bytes([n]) * 100)
    train, valid = train_gpt.read_text(str(tmp_path))
    assert sorted(set(valid)) == [10, 30]
    assert len(valid) == 200
    assert len(train) == 3800
    assert not set(train) & set(valid)
    train, valid = train_gpt.read_text(str(tmp_path / "07.txt"))
    assert (len(train), len(valid)) == (95, 5)
    with pytest.raises(SystemExit, match="5 bytes are too few for sequences of 64"):
        train_gpt.sample_batch(valid, np.random.default_rng(0), 1, 64)


@pytest.mark.parametrize("name", ["quickstart", "packed_sequences", "block_sparse"])
def test_agrees(name, tmp_path):
    printed = run(name, cwd=tmp_path)
    compared = re.findall(r"^(\w+) +(.*), largest value (\S+)$", printed, re.MULTILINE)
    assert [row[0] for row in compared] == ["out", "dquery", "dkey", "dvalue"]
    for _, difference, largest in compared:
        difference = float(difference.split()[-1])
        assert 0 <= difference <= 64 * np.finfo(np.float32).eps * float(largest)
    assert not list(tmp_path.iterdir())


def test_quickstart_shows_what_jax_nn_has_not(tmp_path):
    shown = re.findall(r"^  flash_attention\(\.\.\., (.*)\) -> float32\[", run("quickstart", cwd=tmp_path), re.MULTILINE)
    assert len(shown) == 4
    names = {name for options in shown for name in options.split(", ")}
    assert not names & set(inspect.signature(jax.nn.dot_product_attention).parameters)


def test_linen_transformer(tmp_path):
    printed = run("linen_transformer", cwd=tmp_path)
    before, after = map(float, re.findall(r"loss (\S+) -> (\S+) nats", printed)[0])
    right = float(re.findall(r"(\S+)% of 512 symbols right", printed)[0])
    assert after < before / 10
    assert right > 95
