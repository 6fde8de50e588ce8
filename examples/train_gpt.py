"""Trains a small GPT on bytes of real text, and compares its attention with `jax.nn.dot_product_attention`.

    python examples/train_gpt.py                                      # minutes on two CPU cores; uses the accelerator if there is one
    python examples/train_gpt.py --text my.txt                        # your own text: a file, or a folder of them
    python examples/train_gpt.py --preset h200 --seq 4096 --remat     # GPT-2 medium's size, bfloat16
    python examples/train_gpt.py --preset h200 --heads 8 --head-dim 128 --attention jax_cudnn

Without --text it reads the source of Python's standard library, which every machine has. It writes loss curves, the comparison
and all numbers to out/train_gpt. The model differs from GPT-2 in its rotary positions and its 256 bytes for tokens.
"""

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import statistics
import sysconfig
import time

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

from flash_jax import explain, flash_attention
from flash_jax.nn.nnx import GroupedQueryAttention

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # after the choice of a backend that needs no screen

ATTENTION = {
    "flash": flash_attention,
    "jax_xla": functools.partial(jax.nn.dot_product_attention, implementation="xla"),
    "jax_cudnn": functools.partial(jax.nn.dot_product_attention, implementation="cudnn"),
}
LABEL = {"flash": "flash_jax", "jax_xla": "jax.nn (xla)", "jax_cudnn": "jax.nn (cudnn)"}
COLOR = {"flash": "#1f6fb4", "jax_xla": "#d1495b", "jax_cudnn": "#8d6a9f"}


@dataclasses.dataclass(frozen=True)
class Config:
    layers: int
    heads: int
    head_dim: int
    seq: int
    tokens: int  # in one step, over all sequences
    steps: int
    learning_rate: float
    dtype: str
    compare: tuple[int, ...]  # sequence lengths
    attention: str = "flash"
    remat: bool = False
    seed: int = 0

    @property
    def features(self) -> int:
        return self.heads * self.head_dim


PRESETS = {
    "small": Config(4, 4, 32, 256, 2048, 300, 2e-3, "float32", (512, 1024, 2048, 4096)),
    "h200": Config(24, 16, 64, 1024, 16384, 300, 3e-4, "bfloat16", (1024, 4096, 16384)),
}
SHORT = {"layers": 1, "seq": 64, "tokens": 512, "steps": 30, "compare": (512,)}


# ----------------------------------------------------------------------------------------------------------------- text
def read_text(path: str | None) -> tuple[np.ndarray, np.ndarray]:
    """`(training, validation)` bytes: every 20th file is for validation, or the last 20th of a single one."""
    root = pathlib.Path(path or sysconfig.get_path("stdlib"))
    files = [root] if root.is_file() else sorted(root.rglob("*" if path else "*.py"))
    left_out = {"site-packages", "dist-packages", "test", "tests"} if path is None else set()
    parts = [file.read_bytes() for file in files if file.is_file() and not left_out & set(file.relative_to(root).parts)]
    if len(parts) < 20:
        text = b"".join(parts)
        cut = len(text) - len(text) // 20
        train, valid = text[:cut], text[cut:]
    else:
        train, valid = (b"".join(p for n, p in enumerate(parts) if (n % 20 == 10) == held_out) for held_out in (False, True))
    return np.frombuffer(train, np.uint8), np.frombuffer(valid, np.uint8)


def sample_batch(text: np.ndarray, rng: np.random.Generator, batch: int, seq: int) -> np.ndarray:
    """int32 `[batch, seq + 1]`: random passages."""
    if len(text) <= seq + 1:
        raise SystemExit(f"--text: {len(text)} bytes are too few for sequences of {seq}. Give more text or a smaller --seq.")
    starts = rng.integers(0, len(text) - seq - 1, batch)
    return np.stack([text[start : start + seq + 1] for start in starts]).astype(np.int32)


# ---------------------------------------------------------------------------------------------------------------- model
class Block(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        width, dtype = config.features, jnp.dtype(config.dtype)
        self.norms = nnx.List([nnx.LayerNorm(width, use_bias=False, dtype=dtype, rngs=rngs) for _ in range(2)])
        self.attention = GroupedQueryAttention(
            config.heads,
            width,
            is_causal=True,
            rope_theta=10000.0,
            use_bias=False,
            dtype=dtype,
            attention_fn=ATTENTION[config.attention],
            rngs=rngs,
        )
        self.up = nnx.Linear(width, 4 * width, use_bias=False, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class GPT(nnx.Module):
    """int32 `[batch, len]` -> float32 logits `[batch, len, 256]`."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        init = nnx.initializers.normal(0.02)
        self.embed = nnx.Embed(256, config.features, embedding_init=init, dtype=dtype, rngs=rngs)
        make = nnx.vmap(lambda rngs: Block(config, rngs), in_axes=0, out_axes=0)
        self.blocks = make(rngs.split(config.layers))  # one module, whose parameters have an axis of layers in front
        self.norm = nnx.LayerNorm(config.features, use_bias=False, dtype=dtype, rngs=rngs)
        self.remat = config.remat

    def __call__(self, tokens):
        """The blocks are alike: one loop over them, compiled once. When decoding, each keeps its cache."""
        graph, params, cache = nnx.split(self.blocks, nnx.Param, ...)

        def apply(x, layer):
            block = nnx.merge(graph, *layer)
            return block(x), nnx.state(block, nnx.Not(nnx.Param))

        if self.remat:  # keep what attention's backward needs, recompute the rest of a block
            policy = jax.checkpoint_policies.save_only_these_names("flash_out", "flash_lse")
            apply = jax.checkpoint(apply, policy=policy, prevent_cse=False)
        x, cache = jax.lax.scan(apply, self.embed(tokens), (params, cache))
        nnx.update(self.blocks, cache)
        return self.embed.attend(self.norm(x)).astype(jnp.float32)


class Training:
    """The model's optimizer and jitted functions."""

    def __init__(self, config: Config):
        self.config = config
        warmup = max(config.steps // 20, 1)
        schedule = optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, warmup, config.steps, config.learning_rate / 10)
        self.optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1))
        self.graph, _ = nnx.split(nnx.eval_shape(lambda: GPT(config, nnx.Rngs(0))), nnx.Param)
        self.step = jax.jit(self._step, donate_argnums=(0, 1))
        self.loss = jax.jit(self._loss)

    @functools.partial(jax.jit, static_argnums=0)
    def begin(self, seed):
        """Parameters and the optimizer's state before the first step."""
        _, params = nnx.split(GPT(self.config, nnx.Rngs(jax.random.key(seed))), nnx.Param)
        return params, self.optimizer.init(params)

    def compiled_step(self, batch: int):
        """`step` for `batch` sequences, without parameters."""
        tokens = jax.ShapeDtypeStruct((batch, self.config.seq + 1), jnp.int32)
        return self.step.lower(*jax.eval_shape(self.begin, 0), tokens).compile()

    def _loss(self, params, tokens):
        logits = nnx.merge(self.graph, params)(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def _step(self, params, state, tokens):
        loss, gradients = jax.value_and_grad(self._loss)(params, tokens)
        updates, state = self.optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss


def train(config: Config, train_text, valid_text) -> tuple[nnx.State, dict]:
    training = Training(config)
    params, state = training.begin(config.seed)
    rng = np.random.default_rng(config.seed)
    batch = max(config.tokens // config.seq, 1)
    held_out = [sample_batch(valid_text, np.random.default_rng(n), batch, config.seq) for n in range(8)]
    validate = lambda: statistics.fmean(float(training.loss(params, tokens)) for tokens in held_out)
    parameters = sum(x.size for x in jax.tree.leaves(params))
    print(f"{parameters / 1e6:.1f} M parameters, {config.layers} layers, {config.heads} heads of {config.head_dim}, {config.dtype}")
    print(f"{batch} sequences of {config.seq} bytes a step, {config.steps} steps on {jax.devices()[0].device_kind}")
    qkv = jax.ShapeDtypeStruct((batch, config.seq, config.heads, config.head_dim), config.dtype)
    print(f"attention: {LABEL[config.attention]}" + (f"; {explain(qkv, qkv, qkv, is_causal=True)}" if config.attention == "flash" else ""))

    losses, validation = [], [(0, validate())]
    every = max(config.steps // 10, 1)
    compiled = training.compiled_step(batch)
    start, paused, speed = time.perf_counter(), 0.0, 0.0
    with tqdm(total=config.steps, unit="step", dynamic_ncols=True) as bar:
        for n in range(1, config.steps + 1):
            tokens = sample_batch(train_text, rng, batch, config.seq)
            params, state, loss = compiled(params, state, tokens)
            losses.append(loss)
            shown = float(losses[max(n - 3, 0)])  # lags behind, so that the device never waits for the display
            if n % every == 0 or n == config.steps:
                jax.block_until_ready(loss)
                before = time.perf_counter()
                validation.append((n, validate()))
                paused += time.perf_counter() - before
            speed = n * batch * config.seq / (time.perf_counter() - start - paused)
            bar.set_postfix_str(f"loss {shown:.3f}, validation {validation[-1][1]:.3f}, {speed:,.0f} tokens/s")
            bar.update()
    losses = [float(loss) for loss in losses]
    nats, temporary = validation[-1][1], temporary_bytes(compiled)
    print(f"training loss {losses[0]:.3f} -> {statistics.fmean(losses[-every:]):.3f} (mean of the last {every} steps)")
    print(f"validation loss {validation[0][1]:.3f} -> {nats:.3f} nats, {nats / np.log(2):.3f} bits a byte")
    print(f"{speed:,.0f} tokens/s, {size(temporary)} of temporary memory a step")
    return params, {"losses": losses, "validation": validation, "tokens_per_second": speed, "temporary_bytes": temporary}


# --------------------------------------------------------------------------------------------------------------- sample
def generate(config: Config, params: nnx.State, prompt: bytes, length: int, temperature: float = 0.8) -> bytes:
    """`length` further bytes: the prompt enters the cache in one call, then one byte at a time."""
    config = dataclasses.replace(config, attention="flash")
    model = nnx.eval_shape(lambda: GPT(config, nnx.Rngs(0)))
    nnx.update(model, params)
    decoder = nnx.view(model, decode=True, batch_size=1, max_length=len(prompt) + length)
    graph, params, cache = nnx.split(decoder, nnx.Param, ...)
    cache = jax.tree.map(lambda x: jnp.zeros((config.layers, *x.shape), x.dtype), cache)  # of each layer

    def advance(params, cache, tokens, key):
        decoder = nnx.merge(graph, params, cache)
        token = jax.random.categorical(key, decoder(tokens)[:, -1] / temperature)
        return nnx.state(decoder, nnx.Not(nnx.Param)), token

    @jax.jit
    def run(params, cache, prompt, key):
        first, *keys = jax.random.split(key, length)
        cache, token = advance(params, cache, prompt, first)
        body = lambda carry, key: ((after := advance(params, carry[0], carry[1][:, None], key)), after[1])
        _, tokens = jax.lax.scan(body, (cache, token), jnp.stack(keys))
        return jnp.concatenate([token, tokens[:, 0]])

    tokens = run(params, cache, jnp.frombuffer(prompt, jnp.uint8)[None].astype(jnp.int32), jax.random.key(config.seed))
    return np.asarray(tokens, np.uint8).tobytes()


# ----------------------------------------------------------------------------------------------------------- comparison
def memory_limit() -> float:
    """Bytes that a step may take: most of the accelerator's memory, or half of this machine's."""
    stats = jax.devices()[0].memory_stats() or {}
    return 0.9 * stats["bytes_limit"] if "bytes_limit" in stats else 0.5 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def compare(config: Config) -> list[dict]:
    """Training steps of a model of at most two layers on one sequence, of several lengths, the implementations taking turns."""
    names = ["flash", "jax_xla"] + ["jax_cudnn"] * ("NVIDIA" in jax.devices()[0].device_kind and config.dtype == "bfloat16")
    rows = []
    for seq in tqdm(config.compare, desc="comparing", unit="length", dynamic_ncols=True):
        runs = {}
        for name in names:
            training = Training(dataclasses.replace(config, layers=min(config.layers, 2), attention=name, seq=seq))
            tokens = np.zeros((1, seq + 1), np.int32)
            step = training.compiled_step(1)
            temporary = temporary_bytes(step)
            rows.append({"attention": name, "seq": seq, "temporary_bytes": temporary, "milliseconds": None})
            if temporary < memory_limit():
                runs[name] = (step, [*training.begin(config.seed)], tokens, rows[-1], [])
        for turn in range(4):
            for step, carry, tokens, _, times in runs.values():
                start = time.perf_counter()
                *carry[:], loss = step(*carry, tokens)
                loss.block_until_ready()
                times += [1e3 * (time.perf_counter() - start)] * (turn > 0)  # the first one warms up
        for *_, row, times in runs.values():
            row["milliseconds"] = statistics.median(times)
    return rows


def temporary_bytes(compiled) -> int:
    """What XLA allocates beside arguments and results while the computation runs."""
    return compiled.memory_analysis().temp_size_in_bytes


def size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def print_table(rows: list[dict]) -> None:
    print(f"\n{'length':>8} {'attention':<15} {'step':>12} {'temporary memory':>18}")
    for row in rows:
        step = "does not fit" if row["milliseconds"] is None else f"{row['milliseconds']:.1f} ms"
        print(f"{row['seq']:>8} {LABEL[row['attention']]:<15} {step:>12} {size(row['temporary_bytes']):>18}")


# ---------------------------------------------------------------------------------------------------------------- plots
def plot_loss(metrics: dict, path: pathlib.Path) -> None:
    losses = np.array(metrics["losses"])
    window = max(len(losses) // 30, 1)
    smooth = np.convolve(losses, np.ones(window) / window, "valid")
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(np.arange(1, len(losses) + 1), losses, color=COLOR["flash"], alpha=0.25, linewidth=1)
    axes.plot(np.arange(len(smooth)) + (window + 1) / 2, smooth, color=COLOR["flash"], label=f"training, mean of {window} steps")
    axes.plot(*zip(*metrics["validation"], strict=True), "o-", color=COLOR["jax_xla"], markersize=4, label="validation")
    axes.set(xlabel="step", ylabel="loss (nats a byte)", ylim=(0, None), title="Loss of the byte-level language model")
    finish(figure, [axes], path)


def plot_comparison(rows: list[dict], path: pathlib.Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    panels = [("milliseconds", 1.0, "step time (ms)"), ("temporary_bytes", 2.0**20, "compiled temporary memory (MiB)")]
    for axis, (field, unit, title) in zip(axes, panels, strict=True):
        for name in dict.fromkeys(row["attention"] for row in rows):
            points = [(row["seq"], row[field] / unit) for row in rows if row["attention"] == name and row[field] is not None]
            if not points:
                continue
            axis.loglog(*zip(*points, strict=True), "o-", base=2, color=COLOR[name], label=LABEL[name])
        axis.set(xlabel="sequence length", title=title)
        ticks = sorted({row["seq"] for row in rows})
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    figure.suptitle(f"Training step of at most two layers on one sequence, {jax.devices()[0].device_kind}")
    finish(figure, axes, path)


def finish(figure, axes, path: pathlib.Path) -> None:
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
        axis.legend(frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


# ----------------------------------------------------------------------------------------------------------------- main
def parse() -> tuple[Config, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="small")
    parser.add_argument("--short", action="store_true", help="seconds instead of minutes, to see that everything works")
    parser.add_argument("--text", metavar="PATH", help="a file or a folder to learn from")
    parser.add_argument("--out", metavar="FOLDER", default="out/train_gpt", help="default: %(default)s")
    parser.add_argument("--attention", choices=ATTENTION)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"])
    parser.add_argument("--remat", action="store_true", default=None, help="recompute activations in the backward, but for attention")
    for name in ("layers", "heads", "head-dim", "seq", "tokens", "steps", "seed"):
        parser.add_argument(f"--{name}", type=int, metavar="N", help="tokens in one step" if name == "tokens" else None)
    parser.add_argument("--learning-rate", type=float, metavar="X")
    parser.add_argument("--compare", type=int, nargs="*", metavar="LENGTH", help="sequence lengths of the comparison; none to skip it")
    arguments = parser.parse_args()
    config = dataclasses.replace(PRESETS[arguments.preset], **(SHORT if arguments.short else {}))
    given = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(Config)}
    return dataclasses.replace(config, **{name: x for name, x in given.items() if x is not None}), arguments


def main() -> None:
    config, arguments = parse()
    out = pathlib.Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    train_text, valid_text = read_text(arguments.text)
    print(f"{len(train_text) / 1e6:.1f} MB of text to learn from, {len(valid_text) / 1e6:.1f} MB for validation")
    params, metrics = train(config, train_text, valid_text)
    metrics |= {"config": dataclasses.asdict(config), "device": jax.devices()[0].device_kind, "jax": jax.__version__}
    plot_loss(metrics, out / "loss.png")

    prompt = valid_text[: config.seq // 4].tobytes()
    text = generate(config, params, prompt, config.seq // 2)
    metrics["sample"] = text.decode("utf-8", "replace")
    print(f"\nsample, after the prompt {prompt[-40:].decode('utf-8', 'replace')!r}:\n{metrics['sample']}")

    if config.compare:
        print("\ntraining step of at most two such layers on one sequence:")
        metrics["comparison"] = compare(config)
        print_table(metrics["comparison"])
        plot_comparison(metrics["comparison"], out / "attention.png")
    (out / "metrics.json").write_text(json.dumps(metrics, indent=1))
    print(f"\nwrote {', '.join(sorted(str(path) for path in out.iterdir()))}")


if __name__ == "__main__":
    main()
