"""What an accepted model must do, checked on a tiny one. Every check answers "ok", "n/a: why" or what is wrong."""

from __future__ import annotations

import inspect
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from building import build
from inputs import BATCH, Run, call, find_runs, numbers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

import hf_entmax
from hf_entmax.integration.discovery import attention_sites
from hf_entmax.integration.forward_code import _is_router

_LEFT = "nor for softmax"


class _Problem(Exception):
    """What is wrong, in a few words."""


class NotRun(Exception):
    """Why a model that was built could not be run."""


class _NotApplicable(Exception):
    """Why a check says nothing about this model."""


def _close(got: list[Tensor], expected: list[Tensor], tolerance: float = 1e-3) -> bool:
    return len(got) == len(expected) and all(_difference(g, e) <= tolerance for g, e in zip(got, expected, strict=True))


def _difference(got: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest number; infinities and NaN must lie in the same places."""
    if got.shape != expected.shape:
        return float("inf")
    finite = expected.isfinite()
    if not torch.equal(finite, got.isfinite()):
        return float("inf")
    if not finite.any():
        return 0.0
    got, expected = got[finite].double(), expected[finite].double()
    return float((got - expected).abs().max() / expected.abs().max().clamp(min=1e-6))


def _outputs(model: nn.Module, runs: list[Run]) -> list[Tensor]:
    with torch.no_grad():
        return [t for run in runs for t in numbers(call(model, run))]


def _gradients(model: nn.Module, runs: list[Run]) -> dict[str, Tensor]:
    """Gradient of a fixed random projection of all outputs, for every parameter."""
    model.zero_grad(set_to_none=True)
    generator = torch.Generator().manual_seed(3)
    for run in runs:
        found = [t for t in numbers(call(model, run)) if t.requires_grad]
        terms = [(t.nan_to_num(0, 0, 0) * torch.randn(t.shape, generator=generator)).mean() for t in found]
        if terms:
            torch.stack(terms).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class Bench:
    """A tiny model, what it computes with softmax, and its checks."""

    def __init__(self, model: PreTrainedModel, runs: list[Run]) -> None:
        """The runs are those of `find_runs`."""
        self.model, self.runs = model, runs
        self.text = next((r for r in runs if not r.path and {"input_ids", "decoder_input_ids"} & set(r.inputs)), None)

    def softmax(self) -> None:
        """What the model computes before it is patched."""
        self.state = {k: v.clone() for k, v in self.model.state_dict().items()}
        self.expected = _outputs(self.model, self.runs)
        self.again = _close(_outputs(self.model, self.runs), self.expected, 0)
        self.gradients = _gradients(self.model, self.runs)
        self.properties = {name: self._holds(check) for name, check in _PROPERTIES.items()}

    def _holds(self, check: Callable[[Bench], None]) -> str:
        try:
            check(self)
        except _NotApplicable as why:
            return str(why)
        except Exception:
            return _LEFT
        return ""

    def all(self) -> dict[str, str]:
        """Every check's answer, save those that need a fresh process."""
        found = {"alpha_1_equals_eager": self._answer(self._alpha_1)}
        with self._patched(alpha="learned", alpha_init=1.5):
            found["every_alpha_gets_a_gradient"] = self._answer(self._alpha_gradients)
            found["no_softmax_in_attention"] = self._answer(self._no_softmax)
            for name, check in _PROPERTIES.items():
                why = self.properties[name]
                found[name] = f"n/a: {why}" if why else self._answer(lambda check=check: check(self))
        found["unpatch"] = self._answer(self._unpatch)
        return found

    def _answer(self, check: Callable[[], None]) -> str:
        try:
            check()
        except _NotApplicable as why:
            return f"n/a: {why}"
        except _Problem as problem:
            return str(problem)
        except Exception as error:
            return f"{type(error).__name__}: {error}".split("\n")[0][:200]
        return "ok"

    @contextmanager
    def _patched(self, **options: Any) -> Iterator[None]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            hf_entmax.patch_model(self.model, backend="torch", **options)
        try:
            yield
        finally:
            hf_entmax.unpatch_model(self.model)

    def _alpha_1(self) -> None:
        if not self.again:
            raise _NotApplicable("its outputs are random")
        with self._patched(alpha=1.0):
            got, gradients = _outputs(self.model, self.runs), _gradients(self.model, self.runs)
        if not _close(got, self.expected):
            worst = max(map(_difference, got, self.expected))
            raise _Problem(f"outputs differ by {worst:.1e}")
        total = torch.stack([g.norm() for g in self.gradients.values()]).norm()
        if set(gradients) != set(self.gradients):
            raise _Problem(f"other parameters get gradients: {sorted(set(gradients) ^ set(self.gradients))[:2]}")
        error = torch.stack([(gradients[n] - g).norm() for n, g in self.gradients.items()]).norm() / total
        if not error <= 1e-3:
            raise _Problem(f"gradients differ by {float(error):.1e}")

    def _alpha_gradients(self) -> None:
        missing = self._without_gradient(None)
        if missing:  # a head all of whose rows have one weight alone has none; near softmax, no head is so sparse
            kept = hf_entmax.alphas(self.model)
            hf_entmax.set_alphas(self.model, 1.05)
            missing = self._without_gradient(missing)
            hf_entmax.set_alphas(self.model, kept)
        if missing:
            raise _Problem(f"none at {len(missing)} modules: {', '.join(missing[:3])}")

    def _without_gradient(self, among: list[str] | None) -> list[str]:
        gradients = _gradients(self.model, self.runs)
        missing = []
        for site in attention_sites(self.model):
            inside = [g for n, g in self.gradients.items() if n.startswith(site.name + ".")]
            if site.name in self.unreached or not any(bool((g != 0).any()) for g in inside):
                continue  # nothing of the module gets a gradient, with softmax neither
            if among is not None and site.name not in among:
                continue
            own = [g for n, g in gradients.items() if n.startswith(site.name + ".entmax_norm.")]
            if not own or not bool(torch.cat(own).isfinite().all()) or bool((torch.cat(own) == 0).any()):
                missing.append(site.name)
        return missing

    def _no_softmax(self) -> None:
        named = set(hf_entmax.unpatched_softmax(self.model))
        modules = dict(self.model.named_modules())
        with _SoftmaxRecorder(self.model) as recorder:
            usual = _outputs(self.model, self.runs)
        silent: dict[str, str] = {}
        for name, operation in recorder.seen.items():
            lineage = [name.rsplit(".", n)[0] for n in range(name.count(".") + 1)] if name else []
            if any(part in named or _is_router(type(modules[part])) for part in lineage):
                continue
            if isinstance(modules[name], PreTrainedModel):  # what a whole model does with its own results
                continue
            silent[name] = f"{operation} in {type(modules[name]).__name__}"
        if not silent:
            return
        with _SoftmaxRecorder(self.model, spoil=set(silent)):  # Sam2's attention computes one and throws it away
            spoiled = _outputs(self.model, self.runs)
        if self.again and usual and len(spoiled) == len(usual) and all(map(_same, spoiled, usual)):
            return
        name, what = next(iter(silent.items()))
        raise _Problem(f"silent: {what} ({name})" + f" and {len(silent) - 1} more" * (len(silent) > 1))

    def _unpatch(self) -> None:
        with self._patched(alpha="learned", alpha_init=1.5):
            pass
        after = self.model.state_dict()
        if after.keys() != self.state.keys() or not all(_same(after[k], v) for k, v in self.state.items()):
            raise _Problem("its state dict is another one")
        if self.again and not all(map(_same, _outputs(self.model, self.runs), self.expected)):
            raise _Problem("its outputs are others")

    unreached: frozenset[str] = frozenset()
    #: Where padding leaves the result of softmax alone.
    sides: frozenset[str] = frozenset()


def _same(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and torch.equal(left.nan_to_num(7.0), right.nan_to_num(7.0))


def _text_run(bench: Bench) -> Run:
    if bench.text is None:
        raise _NotApplicable("reads no tokens")
    return bench.text


def _sequence(output: Any, length: int) -> Tensor:
    """The first output that has one entry for each token."""
    for found in numbers(output):
        if found.dim() >= 2 and found.shape[0] == BATCH and found.shape[1] == length:
            return found
    raise _NotApplicable("no output for each token")


def _causal(bench: Bench) -> None:
    run = _text_run(bench)
    name = "decoder_input_ids" if "decoder_input_ids" in run.inputs else "input_ids"
    ids = run.inputs[name]
    other = ids.clone()
    other[:, -1] = ids[:, 0] + 1
    length = ids.shape[1]
    with torch.no_grad():
        whole = _sequence(call(bench.model, run), length)
        changed = _sequence(call(bench.model, run, **{name: other}), length)
    if _difference(changed[:, :-1], whole[:, :-1]) > 1e-4:
        raise _Problem("tokens look ahead")
    if _difference(changed[:, -1], whole[:, -1]) == 0:
        raise _Problem("the last token does not matter")


def _padding(bench: Bench) -> None:
    """On every side where padding leaves the result of softmax alone, it must do so in the patched model."""
    run = _text_run(bench)
    if "attention_mask" not in run.inputs:
        raise _NotApplicable("no attention mask of tokens")
    sides = _sides(bench, run)
    if not hf_entmax.is_patched(bench.model):
        bench.sides = sides
    if broken := ["left", "right"] if not sides else sorted(bench.sides - sides):
        raise _Problem(f"padding on the {' or '.join(broken)} changes the result")


def _sides(bench: Bench, run: Run) -> frozenset[str]:
    """Where padding may be: left, right."""
    ids, extra = run.inputs["input_ids"], 3
    decodes = "decoder_input_ids" in run.inputs
    length = run.inputs["decoder_input_ids"].shape[1] if decodes else ids.shape[1]
    takes_positions = "position_ids" in inspect.signature(bench.model.forward).parameters
    found = set()
    with torch.no_grad():
        whole = _sequence(call(bench.model, run), length)
        for side, pad in (("left", (extra, 0)), ("right", (0, extra))):
            mask = nn.functional.pad(run.inputs["attention_mask"], pad)
            changed: dict[str, Any] = {"input_ids": nn.functional.pad(ids, pad, value=7), "attention_mask": mask}
            if "bbox" in run.inputs:
                changed["bbox"] = run.inputs["bbox"][:, :1].expand(-1, ids.shape[1] + extra, -1)
            if takes_positions and side == "left":
                changed["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
            try:
                got = _sequence(call(bench.model, run, **changed), length if decodes else length + extra)
            except Exception:  # not a side for this model, of either kind: with softmax it does not run either
                continue
            if not decodes:
                got = got[:, extra:] if side == "left" else got[:, :-extra]
            if _difference(got, whole) <= 1e-3:
                found.add(side)
    return frozenset(found)


def _cached(bench: Bench) -> None:
    run, model = _text_run(bench), bench.model
    parameters = inspect.signature(model.forward).parameters
    if "past_key_values" not in parameters:
        raise _NotApplicable("no cache")
    decodes = "decoder_input_ids" in run.inputs
    if decodes and "encoder_outputs" not in parameters:
        raise _NotApplicable("no cache")
    name = "decoder_input_ids" if decodes else "input_ids"
    ids = run.inputs[name]
    with torch.no_grad():
        whole = _sequence(call(model, run), ids.shape[1])
        part: dict[str, Any] = {name: ids[:, :-2], "use_cache": True}
        if "attention_mask" in run.inputs and not decodes:
            part["attention_mask"] = run.inputs["attention_mask"][:, :-2]
        output = call(model, run, **part)
        for step in (2, 1):
            own = slice(-step, None if step == 1 else 1 - step)
            part = {name: ids[:, own], "use_cache": True, "past_key_values": output.past_key_values}
            if decodes:
                part |= {"encoder_outputs": (output.encoder_last_hidden_state,)}
            elif "attention_mask" in run.inputs:
                end = ids.shape[1] - step + 1
                part |= {"attention_mask": run.inputs["attention_mask"][:, :end]}
            encoded = output.encoder_last_hidden_state if decodes else None
            output = call(model, run, **part)
            if decodes and output.encoder_last_hidden_state is None:
                output.encoder_last_hidden_state = encoded
            if _difference(_sequence(output, 1), whole[:, own]) > 1e-3:
                raise _Problem("cached results differ")


def _saved(bench: Bench) -> None:
    with tempfile.TemporaryDirectory() as folder:
        bench.model.save_pretrained(folder)
        patched = hf_entmax.is_patched(bench.model)
        again = (
            type(bench.model).from_pretrained(folder, **({} if patched else {"attn_implementation": "eager"})).eval()
        )
        for module in again.modules():
            if isinstance(module, PreTrainedModel):
                module.config._experts_implementation = "eager"
        for parameter in again.parameters():
            parameter.data = parameter.data.clone()  # loaded ones lie where some kernels round otherwise
        if patched and not hf_entmax.is_patched(again):
            raise _Problem("is loaded without the patch")
        if not bench.again:
            raise _NotApplicable("its outputs are random")
        if not _close(_outputs(again, bench.runs), _outputs(bench.model, bench.runs), 1e-6):
            raise _Problem("the loaded model computes something else")


_PROPERTIES: dict[str, Callable[[Bench], None]] = {
    "causal": _causal,
    "padding": _padding,
    "cached": _cached,
    "save_and_load": _saved,
}


class _SoftmaxRecorder(TorchDispatchMode):
    """Which module was running when a softmax was computed; in the modules to spoil, its result is made wrong."""

    _OPERATIONS = ("softmax", "scaled_dot_product", "logsumexp", "flex_attention")

    def __init__(self, model: nn.Module, spoil: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        super().__init__()
        self.spoil = spoil
        self.seen: dict[str, str] = {}
        self._stack: list[str] = []
        self._hooks = []
        for name, module in model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(lambda *_, name=name: self._stack.append(name)))
            self._hooks.append(module.register_forward_hook(lambda *_: (self._stack.pop(), None)[1], always_call=True))

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if any(part in name for part in self._OPERATIONS) and self._stack and "backward" not in name:
            self.seen.setdefault(self._stack[-1], name)
            if self._stack[-1] in self.spoil:
                found = func(*args, **(kwargs or {}))
                return torch.utils._pytree.tree_map_only(Tensor, lambda t: 3 * t + 1, found)
        return func(*args, **(kwargs or {}))


def check(cls: type[PreTrainedModel], config: Any, folder: Path | None) -> dict[str, str]:
    """Build a model and check it.

    Args:
        cls: class of the model.
        config: its configuration.
        folder: where the patched model is left for a fresh process, or None.

    Returns:
        A row of the table: the fields of a model that was built, whether it was accepted, and each check's answer.

    Raises:
        Exception: whatever keeps the model from being built or from running with softmax.
    """
    model = build(cls, config)
    row = {"class": cls.__name__, "parameters": str(sum(p.numel() for p in model.parameters()))}
    row["kind"] = kind(model)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            hf_entmax.unpatch_model(hf_entmax.patch_model(model))
    except Exception as error:
        text = str(error).split("cannot be patched: ")[-1].split(". Patching would")[0]
        # What is called attention and calls no softmax, as MRA's, is some all the same.
        if "no module of it calls" in str(error) and not any("Att" in type(m).__name__ for m in model.modules()):
            return row | {"verdict": "no attention"}
        return row | {"verdict": "refused", "reason": text if isinstance(error, ValueError) else repr(error)[:200]}
    runs, unreached, problem = find_runs(model)
    if not runs:
        raise NotRun(problem or "its outputs hold no numbers")
    sites = attention_sites(model)
    row |= {
        "verdict": "accepted",
        "sites": " ".join(f"{s}:{sum(x.site == s for x in sites)}" for s in sorted({x.site for x in sites})),
        "sites_run": f"{len(sites) - len(unreached)}/{len(sites)}",
        "unpatched_softmax": " ".join(
            sorted({type(model.get_submodule(n)).__name__ for n in hf_entmax.unpatched_softmax(model)})
        ),
    }
    bench = Bench(model, runs)
    bench.unreached = frozenset(site.name for site in unreached)
    bench.softmax()
    row |= bench.all()
    if folder is not None:
        with bench._patched(alpha="learned", alpha_init=1.5):
            model.save_pretrained(folder)
            torch.save((runs, _outputs(model, runs)), folder / "outputs.pt")
    return row


def kind(model: PreTrainedModel) -> str:
    """What it reads: text, image, audio, ..., by the main inputs of the models in it."""
    mains = {getattr(m, "main_input_name", "") for m in model.modules() if isinstance(m, PreTrainedModel)}
    names = inspect.signature(model.forward).parameters
    found = []
    if "input_ids" in names or any(m == "input_ids" for m in mains if len(mains) == 1):
        found.append("text")
    if any("pixel" in m for m in (*mains, *names)) or any("grid_thw" in n for n in names):
        found.append("image")
    if any(m in ("input_features", "input_values", "audio_values") for m in (*mains, *names)):
        found.append("audio")
    return " + ".join(found) or "other"
