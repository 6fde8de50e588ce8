"""Simulated cycles of the TPU kernels, side by side with jax's splash and flash attention: no TPU is needed, and none is measured.

    python benchmarks/tpu_static.py                        the table: forward and backward, full, causal and window, on v5e and v6e
    python benchmarks/tpu_static.py --tiles --only causal  our kernels over candidate tiles
    python benchmarks/tpu_static.py --generations v5p

libtpu compiles each kernel ahead of time and simulates the program bundle by bundle, with stalls and a model of DMA. It needs
`pip install "jax[tpu]"`. One head is simulated (on v5p two, one a core). Its traps, and what guards against them:

* scalar prefetch is not simulated, so splash's schedule is given as arithmetic on the grid; ours is arithmetic already;
* v4 and 7x cycles are refused: the first aborts, the second has shown impossible values;
* more MXU use than 100 % is refused; and a causal kernel must cost 0.9 to 1.4 times its share of tiles of the full one.
"""

import argparse
import glob
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile

# topology, MACs a cycle and device (bfloat16), device kind
GENERATIONS = {
    "v5e": ("v5e:2x2", 4 * 128 * 128, "TPU v5 lite"),
    "v5p": ("v5p:2x2x1", 2 * 4 * 128 * 128, "TPU v5"),
    "v6e": ("v6e:2x2", 2 * 256 * 256 * 2, "TPU v6 lite"),
}
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
HEAD_DIM = 128
LENGTHS = {"full": 4096, "causal": 8192, "window": 8192}
WINDOW = 1024


def visible_scores(mask: str) -> float:
    n = LENGTHS[mask]
    return {"full": n * n, "causal": n * (n + 1) / 2, "window": n * WINDOW - WINDOW * (WINDOW - 1) / 2}[mask]


def arrays(mask, heads, heads_first):
    import jax
    import jax.numpy as jnp

    n = LENGTHS[mask]
    x = jax.ShapeDtypeStruct((heads, n, HEAD_DIM) if heads_first else (1, n, heads, HEAD_DIM), jnp.bfloat16)
    return x, jax.ShapeDtypeStruct(x.shape[:-1], jnp.float32)


def ours(generation, heads, tiles=None):
    """name -> (function, arguments)."""
    import jax.numpy as jnp
    import numpy as np

    from flash_jax.backends import tpu
    from flash_jax.backends.base import Device
    from flash_jax.problem import Operands, Problem
    from flash_jax.visibility import MaskOperands, MaskSpec, RowRule

    device = Device("tpu", GENERATIONS[generation][2])

    def cases(mask, tiles):
        n = LENGTHS[mask]
        rule = {"full": RowRule(n), "causal": RowRule(n, right=0), "window": RowRule(n, left=WINDOW - 1, right=0)}[mask]
        problem = Problem(1, n, n, heads, heads, HEAD_DIM, HEAD_DIM, np.dtype(jnp.bfloat16), MaskSpec(rule), HEAD_DIM**-0.5)
        config = tpu.BACKEND.default_config(problem, device)
        if tiles:
            tiles = tpu.Tiles(tiles[0], tiles[1], n, tiles[2])
            config = tpu.Config(tiles, tiles, config.vmem)
        operands = lambda q, k, v: Operands(q, k, v, None, None, MaskOperands(), None)

        def forward(q, k, v):
            return tpu.BACKEND.forward(problem, config, operands(q, k, v))

        def backward(q, k, v, out, lse, dout):
            gradients = tpu.BACKEND.backward(problem, config, operands(q, k, v), out, lse, dout, lse, ("query", "key", "value"))
            return tuple(gradients.values())

        x, row = arrays(mask, heads, heads_first=False)
        chosen = lambda t: f"{t.block_q}/{t.block_kv}/{t.unroll}"
        return {
            f"ours forward {mask} {chosen(config.forward)}": (forward, (x, x, x)),
            f"ours backward {mask} {chosen(config.backward)}": (backward, (x, x, x, x, row, x)),
        }

    candidates = [None]
    if tiles:
        candidates = [t for t in itertools.product((512, 1024, 2048), (512, 1024), (1, 2)) if t[1] * t[2] <= 1024]
    return {name: case for mask in LENGTHS for t in candidates for name, case in cases(mask, t).items()}


def splash(heads):
    """jax's splash attention: forward, and the fused backward."""
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as info

    minor = kernel.QKVLayout.HEAD_DIM_MINOR
    common = {"mask_value": kernel.DEFAULT_MASK_VALUE, "is_mqa": False}

    def by_arithmetic(causal, block_q, block_kv):
        def next_nonzero(h, i, j, data_next_ref, block_mask_ref, m_next_ref, next_i=False):
            if not causal:
                return (i if next_i else j), None, True, True
            run = j * block_kv <= i * block_q + (block_q - 1)
            if next_i:
                return jnp.where(run, i, (j * block_kv) // block_q), None, run, True
            return jnp.where(run, j, 0), None, run, True

        return next_nonzero

    def patched(causal, blocks, function):
        def run(*args):
            original = kernel._next_nonzero
            kernel._next_nonzero = by_arithmetic(causal, *blocks[:2])
            try:
                return function(*args)
            finally:
                kernel._next_nonzero = original

        return run

    def cases(mask, blocks):
        causal, (x, row) = mask == "causal", arrays(mask, heads, heads_first=True)
        mask_info = info.MaskInfo(None, None, None, None, jnp.arange(LENGTHS[mask], dtype=jnp.int32) if causal else None)
        function = (lambda q, k: q >= k) if causal else None

        def forward(q, k, v):
            sizes = kernel.BlockSizes(block_q=blocks[0], block_kv=blocks[1], block_kv_compute=blocks[2])
            return kernel._splash_attention_forward(
                mask_info, q, k, v, None, None, block_sizes=sizes, residual_checkpoint_name=None, save_residuals=False,
                mask_function=function, **common,
            )  # fmt: skip

        def backward(q, k, v, lse, do, di):
            return kernel._splash_attention_bwd_dkv(
                q, k, v, None, None, lse, do, di, bq=blocks[0], bkv=blocks[1], bkv_compute=blocks[2], mask_info=mask_info,
                attn_logits_soft_cap=None, use_fused_bwd_kernel=True, q_layout=minor, k_layout=minor, v_layout=minor,
                mask_function=function, interpret=False, **common,
            )  # fmt: skip

        name = "/".join(map(str, blocks))
        return {
            f"splash forward {mask} {name}": (patched(causal, blocks, forward), (x, x, x)),
            f"splash backward {mask} {name}": (patched(causal, blocks, backward), (x, x, x, row, x, row)),
        }

    blocks = ((1024, 1024, 512), (2048, 2048, 512), (1024, 1024, 1024))
    return {name: case for mask in ("full", "causal") for b in blocks for name, case in cases(mask, b).items()}


def flash(heads):
    """jax's flash attention: forward."""
    from jax.experimental.pallas.ops.tpu import flash_attention as fa

    def case(mask, blocks):
        def forward(q, k, v):
            return fa._flash_attention_impl(
                q[None], k[None], v[None], None, None, False, mask == "causal", HEAD_DIM**-0.5, 1, *blocks[:2], blocks[2], False
            )

        x, _ = arrays(mask, heads, heads_first=True)
        return {f"flash forward {mask} {'/'.join(map(str, blocks))}": (forward, (x, x, x))}

    return {name: c for mask in ("full", "causal") for b in ((1024, 1024, 1024), (1024, 2048, 512)) for name, c in case(mask, b).items()}


def cases(generation, tiles):
    heads = 2 if generation == "v5p" else 1
    found = ours(generation, heads, tiles)
    return found if tiles else found | splash(heads) | flash(heads)


def simulate(name, generation, tiles, folder):
    """In this process, whose environment points libtpu at the folder: `{kernel: cycles}`, VMEM and spills."""
    import jax
    import numpy as np
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform="tpu", topology_name=GENERATIONS[generation][0])
    device = topology.devices[0]
    function, arguments = cases(generation, tiles)[name]
    sharding = jax.sharding.SingleDeviceSharding(device)
    arguments = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in arguments]
    mesh = jax.sharding.Mesh(np.array([device]), ("one",)).abstract_mesh
    with jax.sharding.use_abstract_mesh(mesh):
        jax.jit(function).lower(*arguments).compile()
    cycles, spills = {}, 0
    for path in glob.glob(f"{folder}/profile/*_static_llo_profile.textproto"):
        with open(path) as file:
            cycles |= {n: int(c) for n, c in re.findall(r'hlo_op_name: "([^"]+)"\s+estimated_cycles: (\d+)', file.read())}
    for path in glob.glob(f"{folder}/*final_bundles.txt"):
        with open(path, errors="replace") as file:
            spills += len(re.findall(r"= vst[^\n]*_spill", file.read()))
    return {"cycles": cycles, "spills": spills}


def run(name, generation, tiles):
    """`simulate` in a process of its own: libtpu reads its flags once, and aborts on what it cannot simulate."""
    with tempfile.TemporaryDirectory() as folder:
        os.mkdir(f"{folder}/profile")
        flags = [
            f"--xla_jf_dump_to={folder}",
            "--xla_jf_dump_llo_text=true",
            "--xla_jf_dump_llo_pass_label_regex=final",
            f"--xla_jf_dump_static_llo_profile_to={folder}/profile",
        ]
        environment = os.environ | ENVIRONMENT | {"LIBTPU_INIT_ARGS": " ".join(flags)}
        command = [sys.executable, __file__, "--child", name, generation, folder] + ["--tiles"] * tiles
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
        return json.loads(lines[-1]) if lines else {"error": result.stderr.strip().splitlines()[-1:]}


def libtpu_version() -> str:
    from importlib.metadata import version

    return f"jax {version('jax')}, libtpu {version('libtpu')}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generations", default="v5e,v6e", help="of v5e, v5p, v6e")
    parser.add_argument("--only", default="", help="regular expression on the names")
    parser.add_argument("--tiles", action="store_true", help="our kernels over candidate tiles")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, generation, folder = options.child
        print(json.dumps(simulate(name, generation, options.tiles, folder)), flush=True)
        os._exit(0)  # libtpu's threads outlive the interpreter
    os.environ.update(ENVIRONMENT)
    print(f"Simulated cycles of one head of {HEAD_DIM} (v5p: two), bfloat16, {LENGTHS}; {libtpu_version()}. No TPU was measured.")
    print(f"{'':6}{'':46}{'kernel':>12}{'with XLA ops':>14}{'MXU %':>8}{'spills':>8}")
    full = {}
    for generation in options.generations.split(","):
        if generation not in GENERATIONS:
            parser.error(f"cycles of {generation} are not simulated; choose of {', '.join(GENERATIONS)}.")
        heads = 2 if generation == "v5p" else 1
        for name in cases(generation, options.tiles):
            if not re.search(options.only, name):
                continue
            result = run(name, generation, options.tiles)
            if "error" in result:
                print(f"{generation:6}{name:46} {result['error']}", flush=True)
                continue
            cycles = result["cycles"]
            kernel = sum(c for n, c in cycles.items() if not n.startswith(("fusion", "copy", "transpose", "bitcast")))
            who, phase, mask, tiling = name.split()
            use = {"forward": 2, "backward": 5}[phase] * visible_scores(mask) * HEAD_DIM * heads / (kernel * GENERATIONS[generation][1])
            note = "  impossible: more than the MXU can do" if use > 1 else ""
            if mask == "full":
                full[generation, who, phase, tiling] = kernel
            elif mask == "causal" and (generation, who, phase, tiling) in full:
                share = kernel / (full[generation, who, phase, tiling] * (LENGTHS[mask] / LENGTHS["full"]) ** 2 / 2)
                note += "" if 0.9 <= share <= 1.4 else f"  suspicious: {share:.2f} of half of full"
            print(f"{generation:6}{name:46}{kernel:12,}{sum(cycles.values()):14,}{100 * use:8.1f}{result['spills']:8}{note}", flush=True)


if __name__ == "__main__":
    main()
