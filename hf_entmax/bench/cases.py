"""What is measured: attention problems and whole models, by themselves or as named lists."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Case:
    """One attention problem.

    Args:
        name: how the results call it.
        batch: B.
        heads: H.
        length: T_q and T_k, unless ``queries`` says otherwise.
        head_dim: D.
        kv_heads: H_kv; H if None.
        queries: T_q; ``length`` if None.
        sharpness: standard deviation of the queries' entries (keys have 1); larger makes rows sparser.
        alpha: one alpha for all heads, or the range in which the heads' learned alphas are drawn.
        causal: causal limit.
        padded: sequences of random length, padded on the right.
        modes: of "forward", "forward+backward" and "memory".
        against: implementations to measure besides ours.
        targets: (implementation, mode, largest allowed ratio of ours to it).
        bits: of a sketch of the keys: ours is then `hf_entmax.ops.exact_sparse_attention`.
    """

    name: str
    batch: int
    heads: int
    length: int
    head_dim: int = 64
    kv_heads: int | None = None
    queries: int | None = None
    sharpness: float = 2.0
    alpha: float | tuple[float, float] = (1.3, 2.0)
    causal: bool = False
    padded: bool = False
    modes: tuple[str, ...] = ("forward", "forward+backward")
    against: tuple[str, ...] = ("eager_softmax", "sdpa")
    targets: tuple[tuple[str, str, float], ...] = field(default=())
    bits: int | None = None


@dataclass(frozen=True)
class ModelCase:
    """Training of a whole model, shaped like BART-base by default.

    Args:
        name: how the results call it.
        batch: sequences a step.
        lengths: shortest and longest source and target length; batches are padded.
        layers: layers of encoder and of decoder.
        width: model width.
        heads: heads per layer.
        vocabulary: number of tokens.
        target: smallest allowed ratio of our tokens/s to those of SDPA softmax.
        kind: "bart", an encoder-decoder, or "llama", a decoder with three query heads per key head.
        bfloat16: under autocast.
    """

    name: str
    batch: int = 4
    lengths: tuple[int, int] = (128, 256)
    layers: int = 6
    width: int = 768
    heads: int = 12
    vocabulary: int = 8192
    target: float | None = None
    kind: str = "bart"
    bfloat16: bool = False


@dataclass(frozen=True)
class LossCase:
    """Losses of a batch of rows, compared with cross-entropy.

    Args:
        kind: of the logits: "flat" (normal with deviation 1, an untrained model), "frequency" (every row knows little more
            than how frequent the classes are, the k-th as 1/k) or "trained" (eight classes of every row lead).
        classes: V.
        rows: N.
        dimension: D of the hidden states that a linear loss makes the logits of; None for losses of logits.
    """

    kind: str
    classes: int = 128_000
    rows: int = 2048
    dimension: int | None = None

    @property
    def name(self) -> str:
        """How the results call it."""
        hidden = "" if self.dimension is None else f", D {self.dimension}"
        return f"V {self.classes}, N {self.rows}{hidden}, {self.kind}"


AnyCase = Case | ModelCase | LossCase

_KINDS = ("flat", "frequency", "trained")
_EVERYBODY = (
    "eager_softmax", "sdpa", "entmax_bisect", "entmax15", "hf_attention_normalizers", "adasplash", "ours_torch"
)  # fmt: skip


def _training(**limits: float) -> tuple[tuple[str, str, float], ...]:
    """Return targets of a training step, by implementation."""
    return tuple((name, "forward+backward", limit) for name, limit in limits.items())


_TARGETS: tuple[AnyCase, ...] = (
    Case("B4 H8 L512, q x 2", 4, 8, 512, against=_EVERYBODY, targets=_training(entmax_bisect=0.01, eager_softmax=0.4)),
    Case("B1 H8 L2048, q x 3", 1, 8, 2048, sharpness=3.0, targets=_training(sdpa=0.4)),
    Case("B1 H8 L2048, q x 1", 1, 8, 2048, sharpness=1.0, targets=_training(sdpa=1.0)),
    Case("B1 H8 L2048, q x 0.6", 1, 8, 2048, sharpness=0.6, alpha=(1.3, 1.5), targets=_training(sdpa=1.0)),
    Case(
        "B1 H4 L4096, q x 3", 1, 4, 4096, sharpness=3.0, modes=("forward", "forward+backward", "memory"),
        targets=(*_training(sdpa=0.33), ("eager_softmax", "memory", 0.125)),
    ),
    Case("B8 H8 L64, q x 2", 8, 8, 64, targets=_training(eager_softmax=1.2)),
    Case("B64 H8 L32, right padding", 64, 8, 32, padded=True, targets=_training(eager_softmax=1.3)),
    Case(
        "decoding, T_q 1, 4096 keys, GQA 4:1", 1, 32, 4096, kv_heads=8, queries=1, modes=("forward",), against=("sdpa",),
        targets=(("sdpa", "forward", 1.0),),
    ),
    ModelCase("BART-base shape, L 128-256", target=1.0),
)  # fmt: skip

_GRID = tuple(
    Case(f"L{n}, q x {s:g}{', causal' * c}", max(1, 1024 // n), 8, n, sharpness=s, causal=c)
    for n in (128, 512, 1024, 2048)
    for s in (0.3, 1.0, 3.0)
    for c in (False, True)
)


def loss_cases(classes: int, rows: int) -> tuple[LossCase, ...]:
    """List cases of every kind of logits, then of hidden states that make such logits."""
    return tuple(LossCase(kind, classes, rows, dimension) for dimension in (None, 256) for kind in _KINDS)


_DECODING = tuple(
    Case(
        f"decoding, {length} keys, GQA 3:1, alpha {alpha}", 1, 9, length, kv_heads=3, queries=1, sharpness=4.0,
        alpha=alpha, modes=("forward",), against=("sdpa", "ours_numba"), bits=4,
        targets=(("sdpa", "forward", limit), *((("ours_numba", "forward", 0.6),) if length == 4096 else ())),
    )
    for length, alpha, limit in ((4096, 1.5, 0.5), (32768, 1.5, 0.15), (32768, (1.1, 2.0), 0.35))
)  # fmt: skip

#: Lists of cases by name: "targets" (with the ratios each should reach), "grid" (length x sharpness x causal), "quick".
#: "decoding" is one query and a sketch of the keys.
PRESETS: dict[str, tuple[AnyCase, ...]] = {
    "quick": (
        Case("L128, q x 2", 4, 8, 128, against=_EVERYBODY),
        Case("L512, q x 2", 2, 8, 512),
        Case("L512, q x 2, causal", 2, 8, 512, causal=True),
    ),
    "targets": _TARGETS,
    "grid": _GRID,
    "decoding": _DECODING,
    "model": (_TARGETS[-1],),
    "losses": loss_cases(128_000, 2048),
    "losses-small": tuple(LossCase(kind, 4000) for kind in _KINDS),
}
