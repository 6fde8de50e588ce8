"""Tables of configurations and the search: whose table counts, what a candidate is, when one replaces the present choice."""

import dataclasses
import json
import pathlib

import jax.numpy as jnp
import pytest
from cases import CASES

from flash_jax import Mask, api
from flash_jax.backends.base import Device
from flash_jax.backends.hopper import backward, backward_fused, backward_roles, forward, launch
from flash_jax.backends.hopper.forward_tile import Config
from flash_jax.tuning import search, table

H200 = Device("gpu", "NVIDIA H200")
KEY = table.Key("hopper forward", 128, 128)


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """The user's and the package's folder, both empty."""
    monkeypatch.setenv("FLASH_JAX_TUNING", str(tmp_path / "user"))
    monkeypatch.setattr(table, "_PACKAGED", tmp_path / "package")
    table._entries.cache_clear()
    yield tmp_path / "user", tmp_path / "package"
    table._entries.cache_clear()


def problem(head_dim=128, **options):
    arrays = [jnp.zeros((1, 512, 2, head_dim), jnp.bfloat16)] * 3
    return api.prepare(*arrays, **options).problem


def test_the_users_table_goes_before_the_packages(folders):
    assert table.lookup(H200.kind, KEY) is None
    entry = KEY._asdict() | {"config": {"block_kv": 96}, "results": "somewhere"}
    folders[1].mkdir()
    (folders[1] / "NVIDIA_H200.json").write_text(json.dumps({"device": H200.kind, "entries": [entry]}))
    table._entries.cache_clear()
    assert table.lookup(H200.kind, KEY) == ({"block_kv": 96}, "somewhere")
    table.store(H200.kind, KEY, {"block_kv": 64}, "here")
    assert table.lookup(H200.kind, KEY) == ({"block_kv": 64}, "here")
    assert table.lookup("NVIDIA H100 80GB HBM3", KEY) is None
    assert table.lookup(H200.kind, KEY._replace(jax="0.99")) is None


def test_an_entry_replaces_the_one_with_its_key_only(folders):
    other = KEY._replace(head_dim=64, v_head_dim=64)
    for key, block_kv in ((KEY, 64), (other, 32), (KEY, 128)):
        path = table.store(H200.kind, key, {"block_kv": block_kv}, "here")
    assert path.parent == folders[0]
    assert len(json.loads(path.read_text())["entries"]) == 2
    assert table.lookup(H200.kind, KEY) == ({"block_kv": 128}, "here")
    assert table.lookup(H200.kind, other) == ({"block_kv": 32}, "here")


def test_a_broken_table_is_named(folders):
    folders[0].mkdir()
    (folders[0] / "NVIDIA_H200.json").write_text('{"entries": [{"kernel": "hopper forward"}]}')
    with pytest.raises(ValueError, match=r"NVIDIA_H200\.json is no table"):
        table.lookup(H200.kind, KEY)


@pytest.mark.usefixtures("folders")
def test_the_kernel_takes_what_was_found_where_it_suits():
    found = Config(2, 64, stages=3)
    assert launch.default_config(problem(), H200)[0] != found
    table.store(H200.kind, KEY, dataclasses.asdict(found), "here")
    measured = "measured on NVIDIA H200: here"
    assert launch.default_config(problem(), H200) == launch.default_config(problem(is_causal=True), H200) == (found, measured)
    blocks = problem(mask=Mask.from_blocks(jnp.ones((2, 4, 4), bool), 128, 128))
    assert launch.default_config(blocks, H200)[0] == found
    for unsuited in (Config(2, 80, v_swizzle=32), Config(3, 64)):  # no whole words of a map; tiles with more rows than a block
        table.store(H200.kind, KEY, dataclasses.asdict(unsuited), "here")
        assert launch.default_config(problem(), H200) == (unsuited, measured)
        untuned, _ = launch.default_config(blocks, Device("gpu", ""))
        assert launch.default_config(blocks, H200) == (untuned, "those measured on NVIDIA H200 do not suit this mask: here")


@pytest.mark.usefixtures("folders")
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_candidates_fit_and_hold_the_present_choice(head_dim):
    found = search.candidates(head_dim, head_dim)
    assert launch.default_config(problem(head_dim), H200)[0] in found
    for config in found:
        assert forward.shared_memory(config, head_dim, head_dim) <= 227 * 1024
        assert config.registers[0] * config.warpgroups + config.registers[1] <= 512
        assert 2 * config.block_kv % config.v_swizzle == 0


def test_shared_memory_counts_every_buffer():
    assert forward.shared_memory(Config(2, 128), 128, 128) == 2 * (128 * 128 * 2 + 2 * 128 * 128 * 2)  # Q, out; two tiles of K, of V
    assert forward.shared_memory(Config(2, 64, separate_out=False), 256, 256) == 2 * (128 * 256 + 2 * 64 * 256 * 2)


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({"present": [[2.0, 2.0, 9.0]], "other": [[1.98, 1.98, 1.98]]}, "present"),  # within the noise, outliers do not count
        ({"present": [[2.0]], "other": [[1.5]]}, "other"),
        ({"present": [[2.0], [1.0]], "other": [[1.0], [3.0]]}, "present"),  # faster on one shape, slower on the whole
        ({"other": [[2.0]], "third": [[1.99]]}, "third"),  # the present one does not run on this card
    ],
)
def test_choose(seconds, chosen):
    assert search.choose(seconds, "present") == chosen


def test_measure_keeps_the_candidates_that_serve_every_shape(monkeypatch):
    clock = iter(range(10**6))
    monkeypatch.setattr(search.time, "perf_counter", lambda: float(next(clock)))
    asked = []

    def runs(configs, shape, head_dim, v_head_dim, label):
        asked.append((shape, list(configs)))
        return {c: lambda: None for c in configs if c != "fails late" or shape != search.SHAPES[-1]}

    monkeypatch.setattr(search, "_runs", runs)
    times = search.measure(["good", "fails late"], 64, 64, rounds=3)
    assert [shape for shape, _ in asked] == list(search.SHAPES)
    assert times == {"good": [[1 / 3] * 3] * len(search.SHAPES)}


@pytest.mark.parametrize("path", sorted(table._PACKAGED.glob("*.json")), ids=lambda path: path.stem)
def test_a_packaged_entry_names_the_results_that_it_comes_from(path):
    entries = table._entries(path)
    assert entries
    for key, entry in entries.items():
        if key.kernel == "hopper backward":
            continue
        assert key.kernel == search.KERNEL
        assert forward.shared_memory(Config(**entry["config"]), key.head_dim, key.v_head_dim) <= 227 * 1024
        measured = json.loads((pathlib.Path(__file__).parents[1] / entry["results"]).read_text())
        where = measured["provenance"]
        assert where["device"].replace(" ", "_") == path.stem
        assert where["jax"].startswith(key.jax + ".")
        config = str(Config(**entry["config"]))
        if "tests" in measured:  # every case passed there, most of them with this configuration
            ran = {name.partition("::test_kernel[")[2]: x for name, x in measured["tests"].items() if "::test_kernel[" in name}
            assert all(any(name.startswith(f"bfloat16-{case.name}-") for name in ran) for case in CASES)
            assert {test["outcome"] for test in ran.values()} == {"passed"}
            assert sum(test.get("hopper") == config for test in ran.values()) > len(CASES) / 2
        else:  # rows that were checked before they were timed
            rows = [record["sides"]["flash_jax"] for record in measured["rows"] if f"_d{key.head_dim}_" in record["row"]]
            assert rows
            assert all("refused" not in side and config in side["runs"] for side in rows)


@pytest.mark.parametrize("path", sorted(table._PACKAGED.glob("*.json")), ids=lambda path: path.stem)
def test_the_backward_that_passed_every_case_is_the_one_that_runs(path):
    entries = {key.head_dim: entry for key, entry in table._entries(path).items() if key.kernel == "hopper backward"}
    assert entries.keys() == {64, 128, 256}
    for head_dim, entry in entries.items():
        tile = backward._tile(problem(head_dim))
        stages = (backward_roles if head_dim == backward_roles.HEAD_DIM else backward_fused).STAGES
        assert entry["config"] == {"block_q": tile[0], "block_kv": tile[1], "stages": stages}
        tests = json.loads((pathlib.Path(__file__).parents[1] / entry["results"]).read_text())["tests"]
        of_cases = 16 if head_dim == 64 else head_dim  # padded to 64
        prefix, suffix = "tests/test_on_device.py::test_kernel[bfloat16-", f"-{of_cases}]"
        ran = [test["outcome"] for name, test in tests.items() if name.startswith(prefix) and name.endswith(suffix)]
        assert len(ran) > len(CASES) / 2
        assert set(ran) == {"passed"}
