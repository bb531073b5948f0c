"""The hooks on configurations, apart from the others so that they need no torch.

A sparse checkpoint must not run as a softmax where hf_entmax is not imported. Two marks in its config.json see to that,
on every part of the configuration that is patched:

- ``"attn_implementation": "hf_entmax"``, a name that Transformers does not know. It is an error, but one that a caller
  switches off with ``attn_implementation="eager"``, and many tools pass that by themselves.
- an entry of ``layer_types`` that no version knows. Transformers checks these when it builds a configuration, and no argument
  of ``from_pretrained`` replaces them before. So the configuration cannot be read, and the error says: ``The `layer_types`
  entries must be in (...) but got ['sparse attention: pip install hf_entmax, and import hf_entmax before loading']``.
  Older versions do not check them for every model; those refuse ``problem_type``, which has the same words (tried: 4.57, 5.0,
  5.4, 5.12, 5.18 and 5.23).
  A configuration that counts its layers in another way has a key of ``id2label`` that is no number instead (``invalid literal
  for int() with base 10: 'sparse attention: ...'``): whether the first mark stops it is tried when the file is written.

The second mark exists in the file alone: it is added when the file is written and taken out when it is read, so that no
configuration in memory has it. Checkpoints saved without it load as before.

What else was weighed. A ``quantization_config`` with a method that nobody knows reads better, but Transformers (4, and 5 up to
5.23) only warns that it skips the quantisation, and loads the weights. A ``dtype`` that does not exist is replaced by the
caller's. A ``model_type`` of our own stops the Auto classes, but ``BertModel.from_pretrained`` only warns, and every tool that
goes by the type (the Hub's, converters) loses it. A name of our own in ``architectures`` is not looked at when a model is loaded.
Weights that do not fit, or a file name of our own for them, would also stop a plain configuration over sparse weights, but break
the Trainer's resuming, adapters, quantisers and everything else that reads safetensors.

What the mark costs: without hf_entmax ``AutoConfig`` cannot read the file either, nor ``AutoTokenizer`` where it asks
for the configuration. The Hub's page still shows the model's type and task.
What it does not stop: weights loaded with ``config=`` another configuration, which the loader was given on purpose.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers.configuration_utils import PreTrainedConfig

#: From a method to what takes its place.
Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]

CONFIG_KEY = "entmax_config"
#: Where `hf_entmax.calibrate_alphas` leaves what it found.
CALIBRATION_KEY = "entmax_calibration"
#: Where `hf_entmax.sparsify` leaves its report.
SPARSITY_KEY = "entmax_sparsity"
#: Where `hf_entmax.generation.calibrate_sets` leaves what it found.
SETS_KEY = "entmax_sets"
#: The name under which the attention function is registered. Transformers treats names with "flash", "sdpa", "flex" or
#: a slash in them specially, so it has none of these.
IMPLEMENTATION = "hf_entmax"
#: The words in config.json that make reading it fail where hf_entmax is not imported.
FILE_MARK = "sparse attention: pip install hf_entmax, and import hf_entmax before loading"


def install() -> None:
    """Hook how ``PreTrainedConfig`` is turned into a dict, written to a file and read from one."""
    from transformers.configuration_utils import PreTrainedConfig

    wrap_methods(
        [
            (PreTrainedConfig, "_remove_keys_not_serialized", ["self", "d"], _remove_keys),
            (PreTrainedConfig, "to_json_file", ["self", "json_file_path", "use_diff"], _write),
            (PreTrainedConfig, "_dict_from_json_file", ["json_file"], _read),
        ]
    )


def wrap_methods(methods: Sequence[tuple[type, str, list[str], Wrapper]]) -> bool:
    """Put wrappers in the place of methods of another library, all or none of them, and only once.

    A method is named by its class, its name and its first parameters, a class method without ``cls``; its wrapper is given the
    method and returns what takes its place.

    Returns:
        True where they were wrapped now, False where they had been before.

    Raises:
        ImportError: if this version of the library lacks one of them or has it with other parameters.
    """
    first: Any = methods[0][0]
    if getattr(first, "_hf_entmax_hooked", False):
        return False
    for owner, name, parameters, _ in methods:
        require(owner, name, parameters)
    for owner, name, _, wrap in methods:
        found = inspect.getattr_static(owner, name)
        original = found.__func__ if isinstance(found, classmethod) else found
        wrapped = functools.wraps(original)(wrap(original))
        setattr(owner, name, classmethod(wrapped) if isinstance(found, classmethod) else wrapped)
    first._hf_entmax_hooked = True
    return True


def _remove_keys(original: Callable[..., Any]) -> Callable[..., Any]:
    def remove_keys_not_serialized(self: PreTrainedConfig, d: dict[str, Any]) -> None:
        original(self, d)
        if d.get(CONFIG_KEY):
            d["attn_implementation"] = IMPLEMENTATION
            return
        # Only sub-models are patched: the key of the whole configuration, read first, must name them one by one.
        nested = {
            k: v["attn_implementation"] for k, v in d.items() if isinstance(v, dict) and v.get("attn_implementation")
        }
        if nested:
            d["attn_implementation"] = nested

    return remove_keys_not_serialized


def _write(original: Callable[..., Any]) -> Callable[..., Any]:
    def to_json_file(self: PreTrainedConfig, json_file_path: str | os.PathLike[str], use_diff: bool = True) -> None:
        original(self, json_file_path, use_diff)
        with open(json_file_path, encoding="utf-8") as file:
            record = json.load(file)
        if _mark(self, record):
            with open(json_file_path, "w", encoding="utf-8") as file:
                file.write(json.dumps(record, indent=2, sort_keys=True) + "\n")

    return to_json_file


def _read(original: Callable[..., Any]) -> Callable[..., Any]:
    def dict_from_json_file(cls: type[PreTrainedConfig], json_file: str | os.PathLike[str]) -> dict[str, Any]:
        record: dict[str, Any] = original(cls, json_file)
        _unmark(record)
        return record

    return dict_from_json_file


def _mark(config: PreTrainedConfig, record: dict[str, Any]) -> bool:
    """Add `FILE_MARK` to every part of ``record`` whose configuration is patched, and to what such a part lies in."""
    from transformers.configuration_utils import PreTrainedConfig

    patched = bool(record.get(CONFIG_KEY))
    for key, value in record.items():
        part = getattr(config, key, None)
        if isinstance(value, dict) and isinstance(part, PreTrainedConfig):
            patched |= _mark(part, value)
    if patched:
        problem = record.get("problem_type")
        record["problem_type"] = FILE_MARK if problem is None else f"{FILE_MARK} ({problem})"
        record["layer_types"] = [*(record.get("layer_types") or []), FILE_MARK]
        if not _stops(type(config), record):
            record["id2label"] = {**(record.get("id2label") or {}), FILE_MARK: ""}
    return patched


def _stops(kind: type[PreTrainedConfig], record: dict[str, Any]) -> bool:
    """Return whether Transformers refuses to build this configuration, in words that say why."""
    try:
        kind.from_dict(copy.deepcopy(record))
    except Exception as error:  # which one it is differs from version to version
        return FILE_MARK in str(error)
    return False


def _unmark(record: dict[str, Any]) -> None:
    """Take out what `_mark` added, and what earlier versions did."""
    for key in ("layer_types", "id2label"):
        value = record.get(key)
        if value and FILE_MARK in value:
            value.remove(FILE_MARK) if isinstance(value, list) else value.pop(FILE_MARK)
            if not value:
                del record[key]
    problem = record.get("problem_type")
    if isinstance(problem, str) and problem.startswith(FILE_MARK):
        record["problem_type"] = problem.removeprefix(FILE_MARK).strip(" ()") or None  # its default
    for value in record.values():
        if isinstance(value, dict):
            _unmark(value)


def softmax_refused(owner: str, requested: object) -> ValueError:
    """Build the error for another attention implementation on a patched model; ``owner`` is the class it was requested from."""
    return ValueError(
        f"{owner} is patched with entmax attention; attn_implementation={requested!r} would silently turn it back into a "
        f"softmax. Leave it out or give {IMPLEMENTATION!r}. To go back to softmax on purpose call "
        "hf_entmax.unpatch_model(model), or for a while use hf_entmax.softmax_attention(model)."
    )


def require(owner: type, name: str, parameters: list[str]) -> None:
    """Raise unless ``owner.name`` exists and its first parameters are these.

    Raises:
        ImportError: naming the method and the version of Transformers that is needed.
    """
    import transformers

    method = getattr(owner, name, None)
    found = list(inspect.signature(method).parameters) if method is not None else None
    if found is None or found[: len(parameters)] != parameters:
        raise ImportError(
            f"hf_entmax needs transformers>=5.18,<6: in version {transformers.__version__}, {owner.__name__}.{name} "
            f"{'does not exist' if found is None else f'has the parameters {found}'}, where {parameters} are expected. "
            'Install it with: pip install "transformers>=5.18,<6"'
        )
