"""Speed of one tile's matrix product on this CPU, by which side is transposed: `python benchmarks/cpu_products.py`."""

import jax
import jax.numpy as jnp
from jax import lax

from flash_jax.bench.timing import interleave

HEADS, HEAD_DIM = 8, 64


def main():
    for rows, keys in ((128, 128), (256, 256), (512, 512)):
        q, k, p = (jnp.ones((HEADS, *shape)) for shape in ((rows, HEAD_DIM), (HEAD_DIM, keys), (keys, rows)))
        products = {"q . k": (q, k, 2, 1), "p . q": (p, q, 2, 1)}
        products["p^T . q, left side transposed"] = (p.swapaxes(1, 2), q, 1, 1)
        sides = {}
        for name, (a, b, i, j) in products.items():
            run = jax.jit(lambda a, b, i=i, j=j: lax.dot_general(a, b, (((i,), (j,)), ((0,), (0,))))).lower(a, b).compile()
            sides[name] = lambda run=run, a=a, b=b: run(a, b)
        samples = interleave(sides, rounds=40)
        operations = 2 * HEADS * rows * keys * HEAD_DIM
        for name in sides:
            print(f"{rows} x {keys}  {name:32} {operations / samples.median(name) / 1e9:6.0f} GFLOP/s")


if __name__ == "__main__":
    main()
