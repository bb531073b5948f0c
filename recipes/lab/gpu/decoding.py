"""How fast is a decoding step with exact sparse attention, against one that reads all keys?"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hf_entmax.ops import entmax_attention, exact_sparse_attention, sketch_keys

from .rows import Rows
from .setting import Setting, figures, goal


def run(rows: Rows, setting: Setting) -> None:
    """One query against 32k keys: exact sparse decoding, ours over all keys, and SDPA; rows alone fill a GPU, or are split."""
    for batch in (1,) if setting.tiny else (8, 1):
        for alpha in (1.5,) if setting.tiny else (1.5, 1.25):
            rows.run(f"batch {batch}, alpha {alpha}", lambda a=alpha, b=batch: decoding(a, b, setting))


def decoding(alpha: float, batch: int, setting: Setting) -> dict[str, Any]:
    """Keys on a few directions, as in trained models, so that few have weight; four query heads share a key head."""
    heads, keys, head_dim = (4, 40, 16) if setting.tiny else (32, 32768, 64)
    generator = torch.Generator(setting.device).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=setting.device)

    key, value = (draw(batch, heads // 4, keys, head_dim).bfloat16() for _ in range(2))
    query, sketch = (3.0 * draw(batch, heads, 1, head_dim)).bfloat16(), sketch_keys(key)
    functions = {
        "sdpa": lambda: F.scaled_dot_product_attention(query, key, value, enable_gqa=True),
        "ours": lambda: entmax_attention(query, key, value, alpha, backend="triton")[0],
        "exact": lambda: exact_sparse_attention(query, sketch, key, value, alpha)[0],
    }
    with torch.no_grad():
        wanted = entmax_attention(query.double(), key.double(), value.double(), alpha, backend="torch")[0]
        errors = {n: float((f().double() - wanted).abs().max()) for n, f in functions.items() if n != "sdpa"}
        if not max(errors.values()) < 0.03:
            raise ValueError(f"off by {errors}: nothing was timed")
        times = figures(setting.times(functions, seconds=6.0))
        counts = exact_sparse_attention(query, sketch, key, value, alpha)[1]
    shares = {name: float(number.sum() / counts.total.sum()) for name, number in counts._asdict().items()}
    ratio = times["exact"]["median"] / times["sdpa"]["median"]
    return {"errors": errors, "times": times, "shares": shares, "goals": {"exact / sdpa": goal(ratio, 0.3)}}
