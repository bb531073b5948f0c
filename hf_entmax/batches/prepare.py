"""What a batch says about its own padding, and a model about what it reads: token ids and masks for every attention site."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils.generic import ModelOutput

#: Keys that a batch may carry for the analysis; the model never sees them.
ANNOTATIONS = (
    "word_ids",
    "decoder_word_ids",
    "dependency_heads",
    "dependency_relations",
    "source_words",
    "target_words",
    "sure_links",
    "possible_links",
)
_MAIN_INPUTS = ("input_ids", "pixel_values", "input_features", "input_values", "inputs_embeds")


@dataclass
class BatchInfo:
    """One batch, made ready for a forward pass that is only looked at.

    Attributes:
        inputs: what the model is called with, on its device.
        size: number of sentences, B.
        input_ids: long [B, T] of the encoder, or of the only stack; None for images and sound.
        mask: bool [B, T], True = real token; None when the batch does not say.
        decoder_ids: long [B, T] of the decoder of an encoder-decoder model.
        decoder_mask: bool [B, T].
        annotations: the entries of :data:`ANNOTATIONS` that the batch carried.
        frames: bool [B, T], True = a position of an encoder that stands for real sound or image; see `learn_padding`.
    """

    inputs: dict[str, Any]
    size: int
    input_ids: Tensor | None = None
    mask: Tensor | None = None
    decoder_ids: Tensor | None = None
    decoder_mask: Tensor | None = None
    annotations: dict[str, Tensor] = field(default_factory=dict)
    frames: Tensor | None = None

    def tokens(self, site: str) -> tuple[Tensor | None, Tensor | None]:
        """Return ids and mask of the queries of a site."""
        if site == "encoder_self":
            return self._encoded()
        return (self.input_ids, self.mask) if self.decoder_ids is None else (self.decoder_ids, self.decoder_mask)

    def sides(self, site: str) -> tuple[tuple[Tensor | None, Tensor | None], tuple[Tensor | None, Tensor | None]]:
        """Return ids and mask of the queries of a site, and of its keys."""
        return self.tokens(site), self._encoded() if site == "cross" else self.tokens(site)

    def learn_padding(self, call: Any) -> None:
        """Learn from an attention call, an ``AttentionCall``, which states of an encoder of sound or images are padding.

        The mask of a batch is of samples there, and only the model knows what becomes of it.
        """
        if self.input_ids is None and self.mask is None and call.site.site in ("encoder_self", "cross"):
            same = call.site.site == "cross" or call.weights.shape[2] == call.weights.shape[3]
            whole = same and call.weights.shape[0] == self.size  # neither parts of an image nor pooled
            self.frames = call.keys if whole else None

    def _encoded(self) -> tuple[Tensor | None, Tensor | None]:
        return self.input_ids, self.frames if self.mask is None else self.mask


def prepare_batch(model: Any, batch: Mapping[str, Any]) -> BatchInfo:
    """Move a batch to the model, work out its masks, and drop what only costs time (labels, caches).

    It is what a data collator returns: ``input_ids``, ``attention_mask``, ``labels`` or ``decoder_input_ids``, ...; an
    encoder-decoder model may be given ``encoder_outputs`` in the place of what its encoder reads.

    Raises:
        TypeError: the batch is no mapping, or its inputs, mask or labels are no tensors.
        ValueError: it holds nothing the model can read, an encoder-decoder model gets neither labels nor
            ``decoder_input_ids``, an id lies outside the model's vocabulary, a sequence is longer than the model allows.
    """
    if not isinstance(batch, Mapping):
        raise TypeError(f"a batch must be a dict of tensors as a data collator returns it, got {type(batch).__name__}.")
    main = next((name for name in _MAIN_INPUTS if batch.get(name) is not None), None)
    # of an encoder that has been run, such as a frozen one
    encoded = batch.get("encoder_outputs") if main is None and is_encoder_decoder(model) else None
    if main is None and encoded is None:
        raise ValueError(
            f"a batch needs one of {', '.join(_MAIN_INPUTS)}; this one has {', '.join(map(str, batch)) or 'nothing'}."
        )
    if not isinstance(encoded, (ModelOutput, tuple, list, type(None))):
        raise TypeError(
            f"encoder_outputs of a batch must be what the encoder returns, or a tuple of it: got {type(encoded).__name__}."
        )
    for name in (*([main] if main else []), "attention_mask", "labels"):
        if not isinstance(batch.get(name), Tensor | None):
            raise TypeError(
                f"{name} of a batch must be a tensor, got {type(batch[name]).__name__}: a tokenizer returns tensors with "
                "return_tensors='pt', and so does a data collator."
            )
    device = next(model.parameters()).device
    tensors = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}
    if encoded is not None:
        # Its class too: some encoders return a mask of their own, which their decoders look for.
        held: Any = encoded if isinstance(encoded, ModelOutput) else BaseModelOutput(encoded[0])
        tensors["encoder_outputs"] = type(held)(
            **{k: v.to(device) if isinstance(v, Tensor) else v for k, v in held.items()}
        )
    first = tensors[main] if main else tensors["encoder_outputs"][0]
    info = BatchInfo(inputs={}, size=int(first.shape[0]))
    info.annotations = {key: tensors.pop(key) for key in ANNOTATIONS if tensors.get(key) is not None}
    labels = tensors.pop("labels", None)
    pad = pad_token_id(model)

    if main == "input_ids":
        ids: Tensor = tensors["input_ids"]
        check_vocabulary(model, ids)
        check_length(model, ids.shape[1])
        mask = _given_mask(tensors, "attention_mask")
        if mask is None:
            mask = _without_outer_padding(ids, pad, model)
            if not bool(mask.all()):
                tensors["attention_mask"] = mask.long()
        info.input_ids, info.mask = ids, mask
    elif main == "inputs_embeds":
        info.mask = _given_mask(tensors, "attention_mask")
    elif encoded is not None:
        info.mask = _mask_of_states(tensors)
    if is_encoder_decoder(model):
        _prepare_decoder(model, info, tensors, labels, pad)

    known = set(inspect.signature(model.forward).parameters)
    info.inputs = {key: value for key, value in tensors.items() if key in known}
    if "use_cache" in known:
        info.inputs["use_cache"] = False
    if "logits_to_keep" in known and "logits_to_keep" not in info.inputs:
        info.inputs["logits_to_keep"] = 1
    return info


@contextlib.contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Switch dropout off inside a block; every module gets its own mode back."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def only_gradients_of(model: torch.nn.Module, parameters: Iterable[Tensor] = ()) -> Iterator[None]:
    """Let no other parameters of a model take gradients inside a block; afterwards all take what they took."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    wanted = {id(parameter) for parameter in parameters}
    try:
        for parameter, _ in before:
            parameter.requires_grad_(id(parameter) in wanted)
        yield
    finally:
        for parameter, flag in before:
            parameter.requires_grad_(flag)


def is_encoder_decoder(model: Any) -> bool:
    """Check whether the model itself runs an encoder and a decoder (a bare encoder of such a model does not)."""
    return (
        bool(getattr(model.config, "is_encoder_decoder", False))
        and "decoder_input_ids" in inspect.signature(model.forward).parameters
    )


def pad_token_id(model: Any) -> int | None:
    """Return the id of padding, wherever the configuration keeps it."""
    for holder in (model.config, getattr(model, "generation_config", None), _text_config(model.config)):
        value = getattr(holder, "pad_token_id", None)
        if isinstance(value, int):
            return value
    return None


def vocabulary_size(model: Any) -> int | None:
    """Return the number of rows of the input embedding, or None for a model without one."""
    try:
        return int(model.get_input_embeddings().weight.shape[0])
    except (AttributeError, NotImplementedError, TypeError):
        return None


def check_vocabulary(model: Any, ids: Tensor, what: str = "token id") -> None:
    """Raise ``ValueError`` for ids that the model has no embedding for."""
    size = vocabulary_size(model)
    if size is not None and len(outside := ids[(ids < 0) | (ids >= size)]):
        raise ValueError(
            f"{what} {int(outside.max())} is outside the model's vocabulary of {size} entries: "
            "the data was made with the tokenizer of another model. Use the tokenizer saved with this model."
        )


def maximum_length(model: Any) -> int | None:
    """Return the longest sequence the position embeddings allow; None for relative or unlimited positions."""
    config = _text_config(model.config)
    kind = getattr(config, "model_type", "")
    if kind in ("t5", "mt5", "umt5", "byt5", "switch_transformers"):
        return None
    for name in ("max_position_embeddings", "n_positions", "max_source_positions"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 1:
            # RoBERTa and its kin number positions from padding_idx + 1 on.
            return value - 2 if kind in ("roberta", "xlm-roberta", "camembert", "longformer", "esm") else value
    return None


def frame_seconds(model: Any, extractor: Any) -> float:
    """Return the seconds from one position of a speech encoder's output to the next; ``extractor`` is of its features."""
    strides = [m.stride[0] for m in model.get_encoder().modules() if isinstance(m, torch.nn.Conv1d)]
    return getattr(extractor, "hop_length", 1) * math.prod(strides) / extractor.sampling_rate


def check_length(model: Any, length: int) -> None:
    """Raise ``ValueError`` for sequences beyond the model's maximum."""
    longest = maximum_length(model)
    if longest is not None and length > longest:
        raise ValueError(
            f"a sequence of {length} tokens is beyond the model's maximum of {longest}: "
            "truncate when tokenizing (truncation=True, max_length=...)."
        )


def _text_config(config: Any) -> Any:
    get = getattr(config, "get_text_config", None)
    try:
        return get() if callable(get) else config
    except ValueError:  # several text towers, none of them the main one
        return config


def _mask_of_states(tensors: dict[str, Any]) -> Tensor | None:
    """Return the mask of the encoder's states: its own, or the batch's where that is not of sound that they were made from."""
    encoded = tensors["encoder_outputs"]
    masks = [encoded.get("attention_mask"), tensors.get("attention_mask")]
    return next((mask.bool() for mask in masks if mask is not None and mask.shape == encoded[0].shape[:2]), None)


def _given_mask(tensors: dict[str, Any], name: str) -> Tensor | None:
    mask = tensors.get(name)
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"{name} must have shape [B, T] with 1 for real tokens, got {shape}.")
    return mask.bool()


def _without_outer_padding(ids: Tensor, pad: int | None, model: Any) -> Tensor:
    """Mark all tokens but the padding before and after a sentence; nothing counts as padding where EOS doubles as PAD."""
    if pad is None or pad == getattr(model.config, "eos_token_id", None):
        return torch.ones_like(ids, dtype=torch.bool)
    real = ids != pad
    return _until_last(real) & _until_last(real.flip(1)).flip(1)


def _prepare_decoder(model: Any, info: BatchInfo, tensors: dict[str, Any], labels: Any, pad: int | None) -> None:
    ids = tensors.get("decoder_input_ids")
    mask = _given_mask(tensors, "decoder_attention_mask")
    if ids is None and isinstance(labels, Tensor):
        shift = getattr(model, "prepare_decoder_input_ids_from_labels", None) or getattr(model, "_shift_right", None)
        if shift is None:
            raise ValueError(
                f"{type(model).__name__} cannot make decoder inputs from labels: put decoder_input_ids into the batch."
            )
        ids = shift(labels)
    if ids is None:
        raise ValueError(
            f"{type(model).__name__} is an encoder-decoder model: the batch needs labels or decoder_input_ids (the target "
            "sentences), otherwise cross-attention and decoder self-attention have nothing to show."
        )
    tensors["decoder_input_ids"] = ids
    check_vocabulary(model, ids, "decoder token id")
    check_length(model, ids.shape[1])
    info.decoder_ids = ids
    if mask is None and isinstance(labels, Tensor) and labels.shape == ids.shape:
        real = labels != -100
        if pad is not None:
            real = real & (labels != pad)
        # Label i is what query i predicts. Ignored labels inside a sentence are still read as inputs.
        mask = _until_last(real)
    elif mask is None:
        real = torch.ones_like(ids, dtype=torch.bool) if pad is None else ids != pad
        # Several models start decoding with the padding token itself.
        real[:, 0] = True
        mask = _until_last(real)
    info.decoder_mask = mask


def _until_last(real: Tensor) -> Tensor:
    """Mark each row up to its last True."""
    return real.flip(1).long().cumsum(1).flip(1) > 0
