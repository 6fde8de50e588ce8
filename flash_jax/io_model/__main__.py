"""What attention costs, from the command line: a table, JSON, a plot."""

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence

from flash_jax.io_model.count import make_problem
from flash_jax.io_model.device import DEVICES, KIB
from flash_jax.io_model.report import Request, plot, records, text
from flash_jax.mask import Mask

PAPER_SRAM = 192 * KIB  # of an A100's SM, Figure 1 and section 2.1 of the paper


def side(word: str) -> int | None:
    """A side of a window: a number, or "none"."""
    return None if word == "none" else int(word)


def parser() -> argparse.ArgumentParser:
    """The options."""
    result = argparse.ArgumentParser(prog="python -m flash_jax.io_model", description=__doc__)
    result.add_argument("--q-len", type=int, required=True)
    result.add_argument("--kv-len", type=int, help="as many as queries by default")
    result.add_argument("--batch", type=int, default=1, help="default: %(default)s")
    result.add_argument("--num-heads", type=int, default=1, help="default: %(default)s")
    result.add_argument("--num-kv-heads", type=int, help="as --num-heads by default")
    result.add_argument("--head-dim", type=int, required=True)
    result.add_argument("--v-head-dim", type=int, help="as --head-dim by default")
    result.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"), help="default: %(default)s")
    result.add_argument("--is-causal", action="store_true")
    result.add_argument("--local-window-size", nargs=2, type=side, metavar=("LEFT", "RIGHT"), help="a number or none for each side")
    result.add_argument("--density", type=float, help="block-sparse: the fraction of the tiles that are visited")
    result.add_argument("--sram", type=int, metavar="BYTES", help="of a core, M; by default that of --device, or 192 KiB")
    result.add_argument("--block-sizes", nargs=2, type=int, metavar=("Q", "KV"), help="tiles of flash_jax; the largest that fit by default")
    result.add_argument("--device", action="append", choices=tuple(DEVICES), help="may be repeated; all by default")
    result.add_argument("--json", action="store_true", help="everything, the kernels and their arrays too, as JSON")
    result.add_argument("--plot", type=pathlib.Path, metavar="PNG", help="bytes, memory and speed against the length")
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = parser()
    o = options.parse_args(arguments)
    mask = Mask.causal() if o.is_causal else Mask(())
    try:
        mask = mask & Mask.sliding_window(*o.local_window_size) if o.local_window_size else mask
        problem = make_problem(
            o.q_len,
            o.kv_len,
            batch=o.batch,
            num_heads=o.num_heads,
            num_kv_heads=o.num_kv_heads,
            head_dim=o.head_dim,
            v_head_dim=o.v_head_dim,
            dtype=o.dtype,
            mask=mask,
        )
        devices = [DEVICES[name] for name in o.device or DEVICES]
        if o.sram:
            devices = [dataclasses.replace(device, sram=o.sram, registers=0) for device in devices]
        one = o.sram or (o.device and len(o.device) == 1)
        sram, on_chip = (devices[0].sram, devices[0].on_chip) if one else (PAPER_SRAM, PAPER_SRAM)
        request = Request(problem, sram, on_chip, tuple(o.block_sizes) if o.block_sizes else None, o.density)
        data = records(request, devices)
        if o.plot:
            plot(request, devices, o.plot)
    except (ValueError, ImportError) as error:
        options.error(str(error))
    sys.stdout.write(json.dumps(data, indent=1) + "\n" if o.json else text(data))


if __name__ == "__main__":
    main()
