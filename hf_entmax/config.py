"""What a patched model is: one frozen record, checked in one place, stored in every checkpoint."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Mapping
from typing import Any, Literal, get_args

from hf_entmax._version import __version__

SCHEMA_VERSION = 1
Site = Literal["encoder_self", "cross", "decoder_self"]
Tie = Literal["none", "layer", "site", "model"]
Backend = Literal["auto", "torch", "numba", "triton"]
AlphaDtype = Literal["float32", "auto"]
LengthScaling = Literal["none", "constant", "log", "adaptive"]
LengthScalingInit = Literal["identity", "paper", "softmax"]
SITES: tuple[Site, ...] = get_args(Site)
BACKENDS: tuple[Backend, ...] = get_args(Backend)
#: Defaults of ``alpha_init`` in earlier versions: stored in every checkpoint, those without a learned alpha too.
_FORMER_STARTS = (1.1,)
_CHOICES = {
    **{"tie": Tie, "backend": Backend, "alpha_dtype": AlphaDtype},
    **{"length_scaling": LengthScaling, "length_scaling_init": LengthScalingInit},
}


@dataclasses.dataclass(frozen=True)
class EntmaxConfig:
    """How the attention (and, optionally, the output) of a model is to be normalised.

    Args:
        alpha: ``"learned"`` for one learnable number per head, ``alpha = lo + (hi - lo) * sigmoid(a)``, or a fixed
            float >= 1 for all heads (1 is softmax, 1.5 is 1.5-entmax, 2 is sparsemax).
        alpha_init: where a learned alpha starts: a float strictly inside ``alpha_range``, or ``"normal"`` to draw
            ``a ~ N(0, 1)`` as Correia et al. 2019 do for training from scratch. The default, 1.01, leaves a
            pretrained softmax model as good as it was (1.1 costs a SmolLM2-135M 10 % of its perplexity) and passes a
            gradient to every ``a``. `hf_entmax.calibrate_alphas` finds higher starts, head by head.
        alpha_range: the open interval ``(lo, hi)`` in which a learned alpha lives, ``1 <= lo < hi``.
        tie: which heads share one learned alpha: ``"none"`` (each head its own), ``"layer"`` (the heads of one
            attention module), ``"site"`` (all heads of one site) or ``"model"`` (all heads).
        sites: the attention sites to patch, a subset of ``("encoder_self", "cross", "decoder_self")``; ``None``
            means all that the model has. Encoder-only models have ``encoder_self``, decoder-only models ``decoder_self``.
        layers: the layers to patch within each site, counted from 0 (negative numbers count from the last one);
            ``None`` means all.
        exclude: names or dotted suffixes of attention modules to leave alone, e.g. ``("encoder.layers.0.self_attn",)``.
            Attention that is left alone by ``sites``, ``layers`` or ``exclude`` keeps its softmax on purpose.
        output_alpha: ``None`` leaves the output a softmax. A float >= 1 trains with the entmax loss and makes
            ``generate()`` use entmax probabilities.
        output_mapping: ``None``, or the name of a multilabel loss (see ``hf_entmax.losses.multilabel``) for a
            sequence-classification head with ``problem_type="multi_label_classification"``.
        backend: which implementation computes the attention; ``"auto"`` chooses by device, shape and arguments.
        mapping: ``"entmax"``, or a mapping of ``hf_entmax.ops.controllable`` that may serve as attention.
        mapping_options: options of that mapping, e.g. ``{"lam": 0.5}`` or ``{"lam": "learned"}``.
        alpha_dtype: ``"float32"`` keeps the learned numbers in float32 whatever the dtype of the model; ``"auto"``
            lets them follow the model (FSDP2 wants one dtype per unit).
        length_scaling: a learned factor of the scores that depends on n, the number of keys that a query may see: those
            up to itself in causal attention, those of its window, the whole source in cross-attention, padding never.
            ``"constant"`` does not depend on n: ``1 + s``, a temperature for each head, which `calibrate_alphas` sets as
            well; ``"log"`` is scalable softmax, ``c + s * log(n)`` with one ``s`` per head; ``"adaptive"`` is
            adaptive-scalable entmax, ``delta + beta * log(n + 1) ** gamma`` with beta and gamma from the hidden state.
            The query is scaled: position biases are not, and a softcap comes after. Never shared, whatever ``tie`` says.
        length_scaling_init: ``"identity"`` starts with a factor of 1 for every n, so that patching changes nothing;
            ``"paper"`` starts as the papers do. ``"softmax"``, for ``"constant"``, starts where entmax is about as sharp as
            the softmax of the same scores, ``1 / (1 + 3 (alpha - 1))``: a pretrained model may then start sparse.
        length_scaling_heads: the heads of each attention module that are scaled, counted from 0; ``None`` means all.

    Raises:
        ValueError: if a value is outside what is allowed; the message says what was given and what is allowed.
        TypeError: if a value is of the wrong type.

    Examples:
        >>> from hf_entmax import EntmaxConfig
        >>> config = EntmaxConfig(alpha=1.5, sites=("cross",))
        >>> config.replace(alpha=2.0).alpha
        2.0
        >>> EntmaxConfig.from_dict(config.to_dict()) == config
        True
    """

    alpha: Literal["learned"] | float = "learned"
    alpha_init: Literal["normal"] | float = 1.01
    alpha_range: tuple[float, float] = (1.0, 2.0)
    tie: Tie = "none"
    sites: tuple[Site, ...] | None = None
    layers: tuple[int, ...] | None = None
    exclude: tuple[str, ...] = ()
    output_alpha: float | None = None
    output_mapping: str | None = None
    backend: Backend = "auto"
    mapping: str = "entmax"
    mapping_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    alpha_dtype: AlphaDtype = "float32"
    length_scaling: LengthScaling = "none"
    length_scaling_init: LengthScalingInit = "identity"
    length_scaling_heads: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        set_ = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731 - the class is frozen
        set_("alpha_range", _range(self.alpha_range))
        lo, hi = self.alpha_range
        if self.alpha != "learned":
            set_("alpha", check_alpha(self.alpha, "alpha", ', or "learned"', ValueError))
        if self.alpha_init != "normal":
            if not _is_number(self.alpha_init) or not lo < float(self.alpha_init) < hi:
                raise ValueError(
                    f"alpha_init={self.alpha_init!r} is not allowed: give a number strictly between {lo} and {hi} "
                    '(alpha_range), or "normal" to draw a ~ N(0, 1).'
                )
            set_("alpha_init", float(self.alpha_init))
        for name, kind in _CHOICES.items():
            _choice(name, getattr(self, name), get_args(kind))
        if self.length_scaling_heads is not None:
            set_("length_scaling_heads", _integers("length_scaling_heads", self.length_scaling_heads, "heads"))
            if min(self.length_scaling_heads) < 0 or len(set(self.length_scaling_heads)) < len(
                self.length_scaling_heads
            ):
                raise ValueError(
                    f"length_scaling_heads={self.length_scaling_heads} must be different numbers from 0 on."
                )
        if self.sites is not None:
            set_("sites", _names("sites", self.sites))
            if not self.sites:
                raise ValueError(f"sites is empty: name at least one of {list(SITES)}, or None for all.")
            for site in self.sites:
                _choice("sites", site, SITES)
        if self.layers is not None:
            set_("layers", _integers("layers", self.layers, "layers"))
        set_("exclude", _names("exclude", self.exclude))
        if self.output_alpha is not None:
            set_("output_alpha", check_alpha(self.output_alpha, "output_alpha", ", or None", ValueError))
        for name in ("mapping", "output_mapping"):
            value = getattr(self, name)
            if not isinstance(value, str) and not (name == "output_mapping" and value is None):
                raise TypeError(f"{name}={value!r} must be the name of a mapping, a string.")
        if not isinstance(self.mapping_options, Mapping):
            raise TypeError(f"mapping_options={self.mapping_options!r} must be a dict of option names to values.")
        set_("mapping_options", dict(self.mapping_options))
        self._reject_options_without_effect()
        if self.mapping == "entmax" and self.mapping_options:
            raise ValueError(
                f"mapping_options={self.mapping_options!r} were given, but mapping='entmax' has none: its alpha is set "
                "by alpha, alpha_init and alpha_range."
            )
        if self.output_alpha is not None and self.output_mapping is not None:
            raise ValueError(
                f"output_alpha={self.output_alpha} and output_mapping={self.output_mapping!r} both choose the training "
                "loss: give one of them."
            )

    def _reject_options_without_effect(self) -> None:
        """Refuse an option that something else switches off."""
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        scaling = ("length_scaling_init", "length_scaling_heads")
        if self.length_scaling == "none":
            if idle := [name for name in scaling if getattr(self, name) != defaults[name]]:
                raise ValueError(
                    f"{idle} would have no effect: length_scaling is 'none'. Choose 'constant', 'log' or 'adaptive'."
                )
        elif self.length_scaling == "constant" and self.length_scaling_init == "paper":
            raise ValueError(
                "length_scaling='constant' has no start in a paper: choose length_scaling_init='identity' or 'softmax'."
            )
        elif self.length_scaling != "constant" and self.length_scaling_init == "softmax":
            raise ValueError(
                f"length_scaling_init='softmax' is a start for 'constant', not for {self.length_scaling!r}: choose 'identity' "
                "or 'paper'."
            )
        elif self.mapping != "entmax":
            raise ValueError(
                f"length_scaling={self.length_scaling!r} is not available for mapping={self.mapping!r}: it scales the "
                "scores of entmax (alpha=1.0 for softmax)."
            )
        if self.mapping != "entmax":
            names, why = ("alpha", "alpha_init", "alpha_range"), f"mapping={self.mapping!r} has no alpha"
        elif self.alpha != "learned":
            names, why = ("alpha_init", "alpha_range", "tie"), f"alpha={self.alpha} is fixed, nothing is learned"
        else:
            return
        if self.mapping != "entmax" and self.tie in ("site", "model"):
            raise ValueError(
                f"tie={self.tie!r} is not available for mapping={self.mapping!r}: choose 'none' or 'layer'."
            )
        if idle := [name for name in names if getattr(self, name) != defaults[name]]:
            raise ValueError(f"{idle} would have no effect: {why}. Leave {'them' if len(idle) > 1 else 'it'} out.")

    def to_dict(self) -> dict[str, Any]:
        """Return plain types only, ready for JSON, with the schema version and the version of hf_entmax that wrote it."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}
        return {"schema_version": SCHEMA_VERSION, "hf_entmax_version": __version__, **plain}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EntmaxConfig:
        """Read what ``to_dict`` wrote.

        Raises:
            ValueError: if the record is no mapping, was written under a newer schema, or has fields unknown to this
                version; nothing is ever dropped silently.
        """
        if not isinstance(data, Mapping):
            raise ValueError(
                f"entmax_config must be a JSON object, not {type(data).__name__}: the checkpoint is damaged."
            )
        data = dict(data)
        written_by = data.pop("hf_entmax_version", "unknown")
        schema = data.pop("schema_version", None)
        if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
            raise ValueError(
                f"entmax_config has schema_version={schema!r}; an integer from 1 to {SCHEMA_VERSION} is expected."
            )
        if schema > SCHEMA_VERSION:
            raise ValueError(
                f"This checkpoint was written by hf_entmax {written_by} with schema version {schema}; hf_entmax "
                f"{__version__} reads up to version {SCHEMA_VERSION}. Upgrade: pip install -U hf_entmax"
            )
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(data) - known):
            raise ValueError(
                f"entmax_config (written by hf_entmax {written_by}) has unknown fields {unknown}; known are {sorted(known)}. "
                "Upgrade hf_entmax, or remove the fields if they were added by hand."
            )
        if (data.get("alpha", "learned") != "learned" or data.get("mapping", "entmax") != "entmax") and (
            data.get("alpha_init") in _FORMER_STARTS
        ):
            del data["alpha_init"]  # the default of the version that wrote it, which had no effect there either
        return cls(**data)

    def replace(self, **changes: Any) -> EntmaxConfig:
        """Return a copy with some fields changed, validated again."""
        _reject_unknown(changes)
        return dataclasses.replace(self, **changes)


def check_alpha(
    value: object, name: str = "alpha", alternative: str = "", wrong_type: type[Exception] = TypeError
) -> float:
    """Return one alpha as a float.

    Args:
        value: a number, or whatever was given instead.
        name: what the message calls it.
        alternative: what else is allowed, for the end of the message.
        wrong_type: the error for what is no number.

    Raises:
        TypeError: if it is no number.
        ValueError: if it is below 1, infinite or NaN.
    """
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
        raise wrong_type(str(alpha_error(value, name, alternative)))
    if not 1.0 <= (number := float(value)) < math.inf:  # type: ignore[arg-type]
        raise alpha_error(number, name, alternative)
    return number


def check_alphas(values: Any) -> None:
    """Raise ValueError unless all alphas in a tensor or a NumPy array are at least 1 and finite."""
    right = (values >= 1) & (values < math.inf)
    if not bool(right.all()):
        raise alpha_error(float(values[~right].reshape(-1)[0]))


def alpha_error(
    value: object, name: str = "alpha", alternative: str = ". Bound a learned alpha, as in 1 + sigmoid(a)"
) -> ValueError:
    """Return the error that says which alphas are allowed."""
    return ValueError(
        f"{name}={value!r} is not allowed: entmax is defined for finite alpha >= 1 (1 is softmax, 2 is sparsemax){alternative}."
    )


def check_new_name(
    name: object, what: str, own: Container[object], registered: Container[object], exist_ok: bool
) -> None:
    """Raise ValueError unless ``name`` may be registered as a mapping, statistic or role (``what``), see `register_mapping`."""
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"name={name!r} is not allowed: give a Python identifier, such as 'my_{what}'.")
    if name in own:
        raise ValueError(f"{name!r} is a {what} of hf_entmax: choose another name.")
    if name in registered and not exist_ok:
        raise ValueError(f"{name!r} is registered already: choose another name, or replace it with exist_ok=True.")


def config_from(config: EntmaxConfig | Mapping[str, Any] | None, overrides: Mapping[str, Any]) -> EntmaxConfig:
    """Make the configuration from what ``patch_model`` was given: a config, a plain dict of fields, keywords, or nothing."""
    _reject_unknown(overrides)
    if config is None:
        return EntmaxConfig(**overrides)
    if isinstance(config, Mapping):
        fields = dict(config)
        config = EntmaxConfig.from_dict(fields) if "schema_version" in fields else config_from(None, fields)
    if not isinstance(config, EntmaxConfig):
        raise TypeError(f"config must be an EntmaxConfig, a dict of its fields or None, not {type(config).__name__}.")
    return config.replace(**overrides) if overrides else config


def _reject_unknown(fields: Mapping[str, Any]) -> None:
    known = [f.name for f in dataclasses.fields(EntmaxConfig)]
    if unknown := sorted(set(fields) - set(known)):
        raise ValueError(f"Unknown option{'s' * (len(unknown) > 1)} {unknown}; EntmaxConfig has {known}.")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _range(value: object) -> tuple[float, float]:
    try:
        lo, hi = value  # type: ignore[misc]
    except (TypeError, ValueError):
        lo = hi = None
    if not (_is_number(lo) and _is_number(hi) and 1.0 <= lo < hi):  # type: ignore[operator]
        raise ValueError(
            f"alpha_range={value!r} is not allowed: give two numbers (lo, hi) with 1 <= lo < hi, e.g. (1.0, 2.0)."
        )
    return float(lo), float(hi)  # type: ignore[arg-type]


def _choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}: {value!r} is not allowed; choose from {list(allowed)}.")


def _names(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, (list, tuple, set, frozenset)) or not all(isinstance(v, str) and v for v in value):
        raise TypeError(f"{name}={value!r} must be a string or a sequence of strings.")
    return tuple(value) if isinstance(value, (list, tuple)) else tuple(sorted(value))


def _integers(name: str, value: object, what: str) -> tuple[int, ...]:
    if isinstance(value, int) and not isinstance(value, bool):
        return (value,)
    if not isinstance(value, (list, tuple, range, set)) or not all(
        isinstance(v, int) and not isinstance(v, bool) for v in value
    ):
        raise TypeError(f"{name}={value!r} must be an integer or a sequence of integers ({what} counted from 0).")
    if not value:
        raise ValueError(f"{name} is empty: name at least one of the {what}, or None for all.")
    return tuple(value)
