"""The IO model's devices and cache, its errors, and its command."""

import dataclasses
import json
import pathlib
import runpy

import numpy as np
import pytest
from io_support import F16, F32, problem

from flash_jax import Mask, io_model
from flash_jax.io_model.__main__ import main


def test_without_a_cache_everything_reaches_hbm():
    p = problem(4096, num_heads=8, head_dim=64)
    for cost in (io_model.standard_forward(p), io_model.flash_forward(p, (128, 128)), io_model.flash_backward(p, (128, 128))):
        assert sum(io_model.dram_bytes(k, cores=132, cache=0) for k in cost.kernels) == cost.hbm


def test_a_cache_keeps_what_fits():
    """One head of 4096 x 64 float16: keys and values 1 MiB together, 32 q tiles, scores 32 MiB."""
    p = problem(4096, head_dim=64)
    flash, (scores, softmax, output) = io_model.flash_forward(p, (128, 128)).kernels[0], io_model.standard_forward(p).kernels
    once, sweep = 4 * 4096 * 64 * F16 + 4096 * F32, 2 * 4096 * 64 * F16
    lse = 4096 * F32
    assert io_model.dram_bytes(flash, cores=4, cache=2**20) == once - lse, "keys and values stay"
    assert io_model.dram_bytes(flash, cores=4, cache=2**20 - 1) == once - lse + (32 // 4 - 1) * sweep, "4 cores share a walk"
    matrix = 4096 * 4096 * F16
    assert io_model.dram_bytes(softmax, cores=4, cache=matrix - 1) == 2 * matrix
    assert io_model.dram_bytes(softmax, cores=4, cache=matrix) == 0
    assert io_model.dram_bytes(scores, cores=4, cache=matrix) == sweep
    assert io_model.dram_bytes(output, cores=4, cache=matrix - 1) == matrix + sweep


def test_a_cache_holds_the_heads_in_flight():
    """8 heads of 4 q tiles each, keys and values 64 KiB a head: 8 cores work on 2 heads, 64 cores on all 8."""
    kernel = io_model.flash_forward(problem(256, num_heads=8, head_dim=64), (64, 64)).kernels[0]
    once = 8 * 4 * 256 * 64 * F16
    assert kernel.sweepers == 4
    for cores, heads in ((8, 2), (64, 8)):
        assert io_model.dram_bytes(kernel, cores, heads * 2**16) == once
        assert io_model.dram_bytes(kernel, cores, heads * 2**16 - 1) == once, "the 4 tiles of a head walk together"
    assert io_model.dram_bytes(kernel, 2, 2**16) == once
    assert io_model.dram_bytes(kernel, 2, 2**16 - 1) == once + 8 * 2**16, "two by two"


def test_roofline_by_hand():
    device = io_model.Device("toy", bandwidth=1e9, matrix_rate=1e12, sram=10**6, registers=0, cores=1, cache=0, sources="invented")
    p = problem(1024, head_dim=64)
    s, softmax, out = io_model.standard_forward(p).kernels
    moved = [(2 * 1024 * 64 + 1024**2) * F16, 2 * 1024**2 * F16, (1024**2 + 2 * 1024 * 64) * F16]
    assert [io_model.dram_bytes(k, 1, 0) for k in (s, softmax, out)] == moved
    assert io_model.seconds(io_model.standard_forward(p), device) == pytest.approx(sum(moved) / 1e9), (
        "memory: 2.4 ms, products: 0.1 ms each"
    )
    flash = io_model.flash_forward(p, (1024, 128))
    assert io_model.seconds(flash, device) == pytest.approx(flash.hbm / 1e9)


@pytest.mark.parametrize("name", io_model.DEVICES)
def test_short_sequences_gain_nothing(name):
    """Where all scores fit into the cache, nothing is saved and the backward does more; where they do not, flash is ahead."""
    device = io_model.DEVICES[name]
    shape = {"num_heads": 16, "head_dim": 64}
    short = problem(256, **shape)
    assert io_model.speedup(short, device, (128, 128), backward=False) == pytest.approx(1)
    assert io_model.speedup(short, device, (128, 128), backward=True) < 1
    start = io_model.gain_from(short, device, (128, 128), backward=True)
    assert (start / 2**0.5) ** 2 * 16 * F16 <= device.cache < 2 * start**2 * 16 * F16, "the scores just no longer fit"
    for n in (start, 2 * start, 16384):
        assert io_model.speedup(problem(n, **shape), device, (128, 128), backward=True) >= 1.05
    assert io_model.gain_from(problem(256, batch=64, **shape), device, (128, 128), backward=True) < start, "a batch fills the cache sooner"


def test_datasheets_are_named():
    for device in io_model.DEVICES.values():
        assert f"{device.matrix_rate / 1e12:g} TFLOP/s" in device.sources
        assert f"{device.bandwidth / 1e12:g} TB/s" in device.sources or f"{device.bandwidth / 1e9:g} GB/s" in device.sources


# ------------------------------------------------------------------------------------------------- errors, command
def test_what_is_not_counted_is_refused():
    p = problem(64)
    with pytest.raises(ValueError, match=r"density must be above 0 and at most 1, got 1\.5"):
        io_model.visits(p, 8, 8, density=1.5)
    with pytest.raises(ValueError, match="density says which tiles are visited, and so do kinds or the problem's mask"):
        io_model.visits(problem(64, mask=Mask.causal()), 8, 8, density=0.5)
    with pytest.raises(ValueError, match="its mask depends on data or is no interval"):
        io_model.visits(problem(64, mask=Mask.from_function(lambda b, h, q, k: q > k)), 8, 8)
    with pytest.raises(ValueError, match=r"kinds must end in \[8, 8\]"):
        io_model.visits(p, 8, 8, kinds=np.ones((1, 1, 4, 8), np.int8))
    with pytest.raises(ValueError, match="q_len must be at least 1, got 0"):
        problem(0)
    with pytest.raises(ValueError, match="num_heads must be a multiple of num_kv_heads, got 4 and 3"):
        problem(8, num_heads=4, num_kv_heads=3)
    with pytest.raises(ValueError, match="Give block_sizes, or sram"):
        io_model.flash_forward(p)
    for changed in ({"dropout_rate": 0.1}, {"bias_shape": (1, 1, 64, 64)}):
        with pytest.raises(NotImplementedError, match="bias and dropout are not counted"):
            io_model.standard_forward(dataclasses.replace(p, **changed))


COMMAND = ["--q-len", "2048", "--head-dim", "64", "--num-heads", "16", "--batch", "8", "--device", "h200", "--block-sizes", "128", "128"]


def test_command_as_json(capsys):
    main([*COMMAND, "--json"])
    data = json.loads(capsys.readouterr().out)
    p = problem(2048, batch=8, num_heads=16, head_dim=64)
    costs = [io_model.standard_forward(p), io_model.algorithm_1(p, 227 * 1024), io_model.flash_forward(p, (128, 128))]
    assert [a["read"] for a in data["forward"]] == [c.read for c in costs]
    assert [a["flops"] for a in data["forward"]] == [c.flops for c in costs]
    assert data["score_matrix_bytes"] == 8 * 16 * 2048**2 * F16
    (device,) = data["devices"]
    assert device["forward_flash_seconds"] == io_model.seconds(costs[2], io_model.DEVICES["h200"])
    assert "datasheet" in device["sources"]


def test_command_as_text(capsys):
    main(COMMAND)
    shown = capsys.readouterr().out
    assert "forward: Algorithm 1, tiles 64 x 454" in shown
    assert "forward: flash_jax, tiles 128 x 128" in shown
    assert "flash has 1.17 times the FLOPs of standard attention" in shown
    without_cache, behind_cache = shown.index("Without a cache between SRAM and HBM:\n"), shown.index("Behind each device's cache:\n")
    assert without_cache < shown.index("forward: standard") < behind_cache < shown.index("H200 SXM")
    assert "kernels take tuned" not in shown
    assert "one matrix of scores is 1.074 GB, flash keeps 1.049 MB" in shown
    assert "H200 SXM" in shown


def test_command_says_whose_tiles_it_took(capsys):
    main(["--q-len", "2048", "--head-dim", "64", "--is-causal"])
    shown = capsys.readouterr().out
    assert "flash_jax's are the largest that fit; its kernels take tuned ones" in shown
    assert "forward: Algorithm 5" in shown
    assert "Algorithm 5 is" in (pathlib.Path(io_model.__file__).parents[2] / "docs" / "io.md").read_text()


def test_command_has_no_times_for_float32(capsys):
    main([*COMMAND, "--dtype", "float32"])
    shown = capsys.readouterr().out
    assert "No roofline: the devices' matrix rates are of bfloat16 and float16." in shown
    assert "one matrix of scores is 2.147 GB" in shown


def test_command_plots(tmp_path: pathlib.Path):
    path = tmp_path / "out.png"
    main([*COMMAND, "--plot", str(path)])
    from matplotlib import image

    pixels = image.imread(path)
    assert pixels.shape[0] > 300
    assert pixels.std() > 0.05, "something is drawn"


def test_command_names_what_is_wrong(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--q-len", "64", "--head-dim", "8", "--density", "2"])
    assert "density must be above 0 and at most 1, got 2.0" in capsys.readouterr().err


def test_the_module_is_the_command(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["io_model", *COMMAND, "--local-window-size", "100", "none", "--json"])
    runpy.run_path(str(pathlib.Path(io_model.__file__).parent / "__main__.py"), run_name="__main__")
    assert json.loads(capsys.readouterr().out)["problem"]["mask"] == "the interval offset=0, left=100"
