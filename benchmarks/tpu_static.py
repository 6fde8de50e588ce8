"""Simulated cycles of the TPU kernels, side by side with jax's splash and flash attention and tokamax's splash: no TPU is needed.

    python benchmarks/tpu_static.py                        the table on v5e and v6e; about an hour on one core
    python benchmarks/tpu_static.py --only 'ours.*causal'  some of it
    python benchmarks/tpu_static.py --tiles --only causal  our kernels over candidate tiles
    python benchmarks/tpu_static.py --generations v5p --save rows.json   into a file, in place of what it has of these rows

libtpu compiles each kernel ahead of time and simulates the program bundle by bundle, with stalls and a model of DMA. It needs
`pip install "jax[tpu]"`. One head is simulated (on v5p two, one a core). Its traps, and what guards against them:

* tables of tiles in scalar memory are not simulated, so splash's schedule is given as arithmetic on the grid. Ours is arithmetic
  already, but for packed sequences and block maps (`packed`, `half` to `sixteenth`): their table is replaced alike;
* v4 and 7x cycles are refused: the first aborts, the second has shown impossible values;
* more MXU use than 100 % is refused; and a causal kernel must cost 0.9 to 1.4 times its share of tiles of the full one.

The first load of keys and values is in the figures, because one head is simulated: with several heads it is hidden. VMEM is what
libtpu reports of the kernel, its spills included.
"""

import argparse
import glob
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from tpu_peers import DOCUMENT, HEAD_DIM, SPARSE, WINDOW, flash, length, splash, tokamax

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
COMMAND = "python benchmarks/tpu_static.py --save FILE"
HEAD_DIMS = {"causal_64": (64, 64), "causal_80": (80, 80), "causal_96": (96, 96), "causal_256": (256, 256), "causal_192_128": (192, 128)}
MASKS = ("full", "causal", "window", "packed", *SPARSE, *HEAD_DIMS)


def head_dims(mask: str) -> tuple[int, int]:
    """Of queries and keys, and of values."""
    return HEAD_DIMS.get(mask, (HEAD_DIM, HEAD_DIM))


def visible_scores(mask: str) -> float:
    n = length(mask)
    if mask in SPARSE:
        return n * n / SPARSE[mask]
    triangle = lambda n: n * (n + 1) / 2
    return {
        "full": n * n,
        **dict.fromkeys(("causal", *HEAD_DIMS), triangle(n)),
        "window": n * WINDOW - triangle(WINDOW - 1),
        "packed": n / DOCUMENT * triangle(DOCUMENT),
    }[mask]


class Kinds:
    """Stands in for the table of kinds of a q tile, by arithmetic on the tile's numbers, which the simulator can follow."""

    def __init__(self, mask, tiles, i):
        self.mask, self.tiles, self.i = mask, tiles, i
        self.shape = (1, tiles.tiles_resident + 2)  # the last two: first visited tile and one past the last

    def __getitem__(self, at):
        import jax.numpy as jnp

        from flash_jax import schedule

        j, (block_q, block_kv) = at[1], (self.tiles.block_q, self.tiles.block_kv)
        of_range = j if isinstance(j, int) else None
        if self.mask in SPARSE:
            if of_range is not None:
                return (0, self.tiles.tiles_resident)[of_range - self.shape[1]]
            return jnp.where((self.i + j) & (SPARSE[self.mask] - 1) == 0, schedule.FULL, schedule.EMPTY)
        document = lambda n: n >> (DOCUMENT.bit_length() - 1)
        first, last = self.i * block_q, self.i * block_q + block_q - 1
        if of_range is not None:
            log = block_kv.bit_length() - 1
            return (document(first) * DOCUMENT >> log, (last >> log) + 1)[of_range - self.shape[1]]
        keys = j * block_kv, j * block_kv + block_kv - 1
        some = (keys[0] <= last) & (document(keys[1]) >= document(first))
        every = (keys[1] <= first) & (document(keys[0]) == document(last))
        return jnp.where(some, jnp.where(every, schedule.FULL, schedule.PARTIAL), schedule.EMPTY)


def as_simulated(mask, function):
    """`function` without what is not simulated: the table of kinds, where a mask has one, and what values that are not finite take."""
    import jax

    from flash_jax.backends.tpu import kinds, visit

    def all_finite(condition, branch, _, *operands):
        return branch(*jax.lax.optimization_barrier((condition, *operands))[1:])

    def run(*args):
        loops, table, cond = visit.visit, kinds.kinds, jax.lax.cond
        jax.lax.cond = all_finite
        if mask == "packed" or mask in SPARSE:
            kinds.kinds = lambda problem, tiles, operands: None
            visit.visit = lambda problem, tiles, ids, first_tile, _, work: loops(
                problem, tiles, ids, first_tile, Kinds(mask, tiles, ids.i), work
            )
        try:
            return function(*args)
        finally:
            visit.visit, kinds.kinds, jax.lax.cond = loops, table, cond

    return run


def ours(generation, heads, tiles=None):
    """name -> (function, arguments)."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from flash_jax.backends import tpu
    from flash_jax.backends.base import Device
    from flash_jax.problem import Operands, Problem
    from flash_jax.visibility import MaskOperands, MaskSpec, RowRule

    device = Device("tpu", GENERATIONS[generation][2])

    def cases(mask, tiles):
        n, (head_dim, v_head_dim) = length(mask), head_dims(mask)
        rule = RowRule(n, left=WINDOW - 1 if mask == "window" else None, right=None if mask == "full" or mask in SPARSE else 0)
        blocks = [None] * (mask in SPARSE)
        spec = MaskSpec(rule, has_labels=mask == "packed", block_sizes=((1024, 1024),) * len(blocks))
        problem = Problem(1, n, n, heads, heads, head_dim, v_head_dim, np.dtype(jnp.bfloat16), spec, head_dim**-0.5)
        config = tpu.default_config(problem, device)
        if tiles:
            tiles = tpu.Tiles(tiles[0], tiles[1], n, tiles[2], tiles[0] // tiles[3], tiles[4])
            config = tpu.Config(tiles, tiles, config.vmem)

        def operands(q, k, v):
            labels = jnp.arange(n, dtype=jnp.int32)[None] // DOCUMENT if mask == "packed" else None
            maps = tuple(jnp.ones((1, 1, n // 1024, n // 1024), bool) for _ in blocks)
            return Operands(q, k, v, None, None, MaskOperands(q_labels=labels, kv_labels=labels, blocks=maps), None)

        def forward(q, k, v):
            return tpu.BACKEND.forward(problem, config, operands(q, k, v))

        def backward(q, k, v, out, lse, dout):
            gradients = tpu.BACKEND.backward(problem, config, operands(q, k, v), out, lse, dout, lse, ("query", "key", "value"))
            return tuple(gradients.values())

        q, v = (jax.ShapeDtypeStruct((1, n, heads, dim), jnp.bfloat16) for dim in head_dims(mask))
        row = jax.ShapeDtypeStruct((1, n, heads), jnp.float32)
        chosen = lambda t: f"{t.block_q}/{t.block_kv}/{t.unroll}/{t.pieces}/{t.band}"
        return {
            f"ours forward {mask} {chosen(config.forward)}": (as_simulated(mask, forward), (q, q, v)),
            f"ours backward {mask} {chosen(config.backward)}": (as_simulated(mask, backward), (q, q, v, v, row, v)),
        }

    candidates = [None]
    if tiles:
        sizes = (512, 1024, 2048), (512, 1024, 2048), (1, 2), (256, 512, 1024), (0, 128, 256)
        candidates = [t for t in itertools.product(*sizes) if t[1] * t[2] <= 2048]
    return {name: case for mask in MASKS for t in candidates if not t or t[3] <= t[0] for name, case in cases(mask, t).items()}


def cases(generation, tiles):
    heads = 2 if generation == "v5p" else 1
    found = ours(generation, heads, tiles)
    return found if tiles else found | splash(heads) | flash(heads) | tokamax(heads)


def simulate(name, generation, tiles, folder):
    """In this process, whose environment points libtpu at the folder."""
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


def simulated(folder) -> dict:
    """What libtpu wrote: `{operation: cycles}`, `{operation: bytes of VMEM}` and spills."""
    cycles, vmem, spills = {}, {}, 0
    for path in glob.glob(f"{folder}/profile/*_static_llo_profile.textproto"):
        with open(path) as file:
            cycles |= {n: int(c) for n, c in re.findall(r'hlo_op_name: "([^"]+)"\s+estimated_cycles: (\d+)', file.read())}
    for path in glob.glob(f"{folder}/*final_bundles.txt"):
        with open(path, errors="replace") as file:
            spills += len(re.findall(r"= vst[^\n]*_spill", file.read()))
    for path in glob.glob(f"{folder}/*vmem_report.html"):
        with open(path) as file:
            report, _ = json.JSONDecoder().raw_decode(file.read().partition("const DATA =")[2])
        vmem |= {n: operation["total_size"] for n, operation in report["hlo_breakdowns"].items()}
    return {"cycles": cycles, "vmem": vmem, "spills": spills}


def run(name, generation, tiles):
    """`simulate` in a process of its own: libtpu reads its flags once, and aborts on what it cannot simulate.

    It may do so after the kernel, at an operation of XLA: then the kernel's cycles are there, and the sum is not known.
    """

    def child(folder, *flags):
        environment = os.environ | ENVIRONMENT | {"LIBTPU_INIT_ARGS": " ".join([f"--xla_jf_dump_to={folder}", *flags])}
        command = [sys.executable, __file__, "--child", name, generation, folder] + ["--tiles"] * tiles
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)

    text = "--xla_jf_dump_llo_text=true", "--xla_jf_dump_llo_pass_label_regex=final"
    with tempfile.TemporaryDirectory() as folder:
        os.mkdir(f"{folder}/profile")
        result = child(folder, *text, f"--xla_jf_dump_static_llo_profile_to={folder}/profile")
        found = simulated(folder) | {"whole": result.returncode == 0}
        if not found["cycles"]:
            return {"error": result.stderr.strip().splitlines()[-1:]}
        if not found["whole"]:  # there is no report of VMEM before all is compiled
            child(folder, *text)
            found["vmem"] = simulated(folder)["vmem"]
        return found


def libtpu_version() -> str:
    from importlib.metadata import version

    return f"jax {version('jax')}, libtpu {version('libtpu')}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generations", default="v5e,v6e", help="of v5e, v5p, v6e")
    parser.add_argument("--only", default="", help="regular expression on the names")
    parser.add_argument("--tiles", action="store_true", help="our kernels over candidate tiles")
    parser.add_argument("--save", help="a JSON file for the rows; others that it has stay")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, generation, folder = options.child
        simulate(name, generation, options.tiles, folder)
        os._exit(0)  # libtpu's threads outlive the interpreter
    os.environ.update(ENVIRONMENT)
    from flash_jax.bench.report import save  # not before the environment is set: it imports jax

    title = f"Simulated cycles, one head of {HEAD_DIM} (v5p: two), bfloat16, length {length('full')}, block maps {length('half')}"
    title = f"{title}; {libtpu_version()}. No TPU was measured."
    print(title, f"{'':50}{'kernel':>12}{'with XLA ops':>14}{'MXU %':>8}{'spills':>8}{'VMEM MiB':>10}", sep="\n", flush=True)
    rows, kept = [], saved(options.save, title)
    for generation in options.generations.split(","):
        if generation not in GENERATIONS:
            parser.error(f"cycles of {generation} are not simulated; choose of {', '.join(GENERATIONS)}.")
        for name in cases(generation, options.tiles):
            if re.search(options.only, name):
                rows.append(row_of(name, generation, options.tiles))
                print(line_of(rows[-1], rows), flush=True)
                kept = [row for row in kept if key(row, options.tiles) != key(rows[-1], options.tiles)] + rows[-1:]
                if options.save:
                    save({"title": title, "command": COMMAND, "rows": kept}, pathlib.Path(options.save))
    for line in best_of_each(rows):
        print(line)


def key(row, tiles) -> tuple:
    """What a row is about: of ours the chosen tiles are no part of it."""
    return *(row[n] for n in ("generation", "who", "phase", "mask")), row["tiles"] if tiles or row["who"] != "ours" else ""


def saved(path, title) -> list:
    """The rows of a file, which have to be of the same version."""
    if not path or not os.path.exists(path):
        return []
    with open(path) as file:
        before = json.load(file)
    if before["title"] != title:
        raise SystemExit(f"--save: {path} has rows of another version: {before['title']}")
    return before["rows"]


def row_of(name, generation, tiles) -> dict:
    who, phase, mask, tiling = name.split()
    row = {"generation": generation, "who": who, "phase": phase, "mask": mask, "tiles": tiling}
    result = run(name, generation, tiles)
    if "error" in result:
        return row | result
    cycles, is_kernel = result["cycles"], re.compile("flash|splash|forward").search
    kernel = sum(c for n, c in cycles.items() if is_kernel(n))
    if not kernel:
        return row | {"error": f"no kernel among {sorted(cycles)}"}
    of_keys, of_values = {"forward": (1, 1), "backward": (3, 2)}[phase]  # products a score
    head_dim, v_head_dim = head_dims(mask)
    work = (of_keys * head_dim + of_values * v_head_dim) * visible_scores(mask) * (2 if generation == "v5p" else 1)
    use = work / (kernel * GENERATIONS[generation][1])
    if use > 1:
        return row | {"error": f"impossible: {kernel} cycles would be {100 * use:.0f} % of what the MXU can do"}
    total = sum(cycles.values()) if result["whole"] else None
    vmem = max((n for name, n in result["vmem"].items() if is_kernel(name)), default=None)
    found = {"kernel": kernel, "with_xla_ops": total, "mxu_percent": round(100 * use, 1), "spills": result["spills"]}
    return row | found | {"vmem_mib": vmem and round(vmem / 2**20, 1)}


def line_of(row, rows) -> str:
    name = f"{row['generation']:6}{' '.join(row[n] for n in ('who', 'phase', 'mask', 'tiles')):44}"
    if "error" in row:
        return f"{name}{row['error']}"
    note = ""
    for full in rows:
        if (
            row["mask"] == "causal"
            and "kernel" in full
            and full == full | {n: row[n] for n in ("generation", "who", "phase")} | {"mask": "full"}
        ):
            share = 2 * row["kernel"] / full["kernel"]
            note = "" if 0.9 <= share <= 1.4 else f"  suspicious: {share:.2f} of half of full"
    total, vmem = (row[n] or "unknown" for n in ("with_xla_ops", "vmem_mib"))
    return f"{name}{row['kernel']:12,}{total:>14}{row['mxu_percent']:8.1f}{row['spills']:8}{vmem:>10}{note}"


def best_of_each(rows) -> list[str]:
    """Ours over the best of the others; and block maps beside the dense one."""
    lines = ["", "ours / the best of the others"]
    best = {}
    for row in rows:
        key = row["generation"], row["phase"], row["mask"], row["who"] == "ours"
        if "kernel" in row and row["kernel"] < best.get(key, {"kernel": float("inf")})["kernel"]:
            best[key] = row
    for key, mine in best.items():
        other = best.get((*key[:3], False))
        if key[3] and other:
            lines.append(f"{' '.join(key[:3]):24}{mine['kernel'] / other['kernel']:6.3f}  of {other['who']} {other['tiles']}")
        dense = best.get((*key[:2], "dense", True))
        if key[3] and dense and key[2] in SPARSE:
            lines.append(f"{' '.join(key[:3]):24}{mine['kernel'] / dense['kernel']:6.3f}  of dense, {1 / SPARSE[key[2]]:.4f} of its scores")
    return lines


if __name__ == "__main__":
    main()
