"""Which implementation runs, and what `explain` says of it."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES

from flash_jax import api, dispatch, explain, flash_attention
from flash_jax.backends import xla
from flash_jax.backends.base import Device

SUPPORT = Path(__file__).with_name("support.json")
HOMES = {
    "hopper": Device("gpu", "NVIDIA H200"),
    "tpu": Device("tpu", "TPU v6 lite"),
    "xla": Device("cpu", "cpu"),
    "cudnn": Device("gpu", "NVIDIA A100"),
}


def declined():
    """`{implementation: {case: sentence}}` on the device that each implementation is for."""
    table = {}
    for backend in dispatch.BACKENDS:
        problems = {case.name: api.prepare(**case.build()[0]).problem for case in CASES}
        if HOMES[backend.name].platform == "gpu":  # there is no point in listing every float32 case
            problems = {
                name: p if p.dtype != np.float32 else dataclasses.replace(p, dtype=np.dtype("bfloat16")) for name, p in problems.items()
            }
            problems["float32"] = api.prepare(**CASES[0].build()[0]).problem
        reasons = {name: backend.why_not(problem, HOMES[backend.name]) for name, problem in problems.items()}
        table[backend.name] = {name: reason for name, reason in reasons.items() if reason is not None}
    return table


def test_the_committed_support_file_says_what_is_declined():
    """After a change on purpose: `python tests/test_dispatch.py` writes the file anew."""
    assert declined() == json.loads(SUPPORT.read_text())


def test_xla_declines_nothing():
    assert json.loads(SUPPORT.read_text())["xla"] == {}


def shapes(dtype="float32", length=64):
    x = jax.ShapeDtypeStruct((2, length, 4, 32), dtype)
    return x, x, x


def test_explain_says_what_runs_and_why_not_the_others():
    explanation = explain(*shapes(), is_causal=True, key_value_seq_lengths=jnp.array([3, 4]))
    assert explanation.implementation == "xla"
    assert explanation.config == xla.Config(block_q=64, block_kv=64, split_batch=False)
    assert set(explanation.why_not) == set(dispatch.NAMES) - {"xla"}
    text = str(explanation)
    assert text.startswith("xla: runs on cpu (cpu) with Config(block_q=64, block_kv=64")
    assert text.splitlines()[0].endswith("(the default)")
    assert len(text.splitlines()) == len(dispatch.NAMES)
    assert all(len(reason) > 20 for reason in explanation.why_not.values())


def test_explain_agrees_with_the_call_on_arrays_and_tiles():
    q = jnp.ones((1, 8, 2, 4))
    chosen = explain(q, q, q, block_sizes=(4, 2))
    assert (chosen.config, chosen.why_config) == (xla.Config(block_q=4, block_kv=2), "block_sizes=(4, 2)")
    assert explain(q, q, q, implementation=("xla",)).implementation == "xla"


@pytest.mark.parametrize(
    ("name", "device", "implementation"),
    [
        ("NVIDIA H100 80GB HBM3", Device("gpu", "NVIDIA H100 80GB HBM3"), "hopper"),
        ("H100", Device("gpu", "H100"), "hopper"),
        ("NVIDIA A100-SXM4-80GB", Device("gpu", "NVIDIA A100-SXM4-80GB"), "cudnn"),
        ("TPU v6e", Device("tpu", "TPU v6e"), "tpu"),
        ("cpu", Device("cpu", "cpu"), "xla"),
    ],
)
def test_explain_of_hardware_that_is_elsewhere(name, device, implementation):
    explanation = explain(*shapes("bfloat16"), is_causal=True, device=name)
    assert (explanation.device, explanation.implementation) == (device, implementation)


@pytest.mark.parametrize("device", ["", 3])
def test_a_device_has_a_name(device):
    with pytest.raises(TypeError, match=f"device must be the name of some hardware, such as 'NVIDIA H200'.*got {device!r}"):
        explain(*shapes(), device=device)


@pytest.mark.parametrize("device", ["h200", "v6e", "tpu"])
def test_a_device_is_spelled_as_jax_does(device):
    with pytest.raises(ValueError, match=f"device must be spelled as JAX does, such as 'NVIDIA H200', 'TPU v6e' or 'cpu', got '{device}'"):
        explain(*shapes(), device=device)


def test_a_backend_is_a_record(monkeypatch):
    """A further implementation is one line in `BACKENDS`; what it cannot serve goes to the next."""
    only_short = dataclasses.replace(
        xla.BACKEND,
        name="short",
        why_not=lambda problem, device: None if problem.q_len < 9 else f"q_len must be below 9, got {problem.q_len}.",
    )
    monkeypatch.setattr(dispatch, "BACKENDS", (only_short, xla.BACKEND))
    monkeypatch.setattr(dispatch, "NAMES", ("short", "xla"))
    assert explain(*shapes(length=8)).implementation == "short"
    long = explain(*shapes(length=9))
    assert (long.implementation, long.why_not) == ("xla", {"short": "q_len must be below 9, got 9."})
    assert explain(*shapes(length=8), implementation=("xla", "short")).why_not == {"short": "could run, but xla comes first."}
    q = jnp.ones((1, 9, 1, 4))
    with pytest.raises(NotImplementedError, match=r"implementation='short' cannot serve this call. short: q_len must be below 9, got 9\."):
        flash_attention(q, q, q, implementation="short")


if __name__ == "__main__":
    SUPPORT.write_text(json.dumps(declined(), indent=2, sort_keys=True) + "\n")
