"""What ``hf-entmax doctor`` examines: the installation, the kernels, a model; and how models are found by name."""

from __future__ import annotations

import importlib.util
import itertools
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table


def examine_installation(console: Console, compile: bool = False, check: bool = False) -> bool:
    """Print versions and backends, and try the whole path on a small model; tell if all is well.

    ``compile`` compiles the CPU kernels for good, ``check`` compares every fused kernel with the dense path.
    """
    import torch
    import transformers

    import hf_entmax
    from hf_entmax.generation.serving import hooks

    versions = {"hf_entmax": hf_entmax.__version__, "python": platform.python_version()}
    versions |= {"torch": torch.__version__, "transformers": transformers.__version__}
    versions |= {package: _version(package) for package in ("accelerate", "peft", "numba", "triton", "matplotlib")}
    console.print(table("Versions", ("package", "version"), versions.items()))
    states = ((name, escape(str(state))) for name, state in hf_entmax.available_backends().items())
    console.print(table("Backends", ("backend", "state"), states))
    console.print("Continuous batching (generate_batch, hf-entmax serve): " + escape(hooks.state()))
    if compile:
        _compile_kernels(console)
    right = _check_kernels(console) if check else True
    try:
        _round_trip()
    except Exception as error:
        console.print(f"[red]Patching a small model failed:[/] {type(error).__name__}: {escape(str(error))}")
        return False
    console.print("Patched, trained, saved and loaded a small model: [green]works[/].")
    return right


def examine_model(model: str, console: Console) -> bool:
    """Print what patching reaches in a model, built from its configuration without weights, and what keeps a softmax.

    Returns whether the model can be patched.
    """
    import torch
    import transformers

    import hf_entmax
    from hf_entmax.integration.discovery import attention_sites, check_supported
    from hf_entmax.integration.model_classes import model_classes

    check_folder(model)
    if model in transformers.CONFIG_MAPPING and not Path(model).exists():
        config = transformers.AutoConfig.for_model(model)
    else:
        config = saved_config(model)
    name = (config.architectures or [""])[0]
    found = [getattr(transformers, name)] if hasattr(transformers, name) else model_classes(config)
    if not found:
        raise ValueError(
            f"Transformers has no model for configurations of model_type {config.model_type!r} alone: "
            "give the model that it is a part of."
        )
    try:
        with torch.device("meta"):
            built = found[0](config)
    except ImportError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise ValueError(f"{found[0].__name__} cannot be built from this configuration. {said}") from error
    try:
        check_supported(built)
    except ValueError as error:
        console.print(f"[red]No:[/] {escape(str(error))}")
        return False
    heads: dict[str, list[int]] = {}
    for site in attention_sites(built):
        heads.setdefault(site.site, []).append(site.num_heads)
    rows = ((site, str(len(own)), str(sum(own))) for site, own in heads.items())
    title = f"{type(built).__name__} can be patched"
    console.print(table(title, ("site", "attention modules", "heads"), rows))
    kept = hf_entmax.unpatched_softmax(built)
    console.print(escape("Keeps a softmax: " + ", ".join(kept)) if kept else "Nothing keeps a softmax.")
    return True


def _compile_kernels(console: Console) -> None:
    from hf_entmax.ops import backends

    module = backends.kernel_package("numba")
    if isinstance(module, str):
        raise ValueError(f"The CPU kernels cannot be compiled: {module}.")
    with console.status("Compiling the CPU kernels: about twenty seconds, once for this machine") as status:
        folder = module.compile_kernels(lambda name: status.update(f"Compiled: {name}"))
    kept = f"kept in {folder}" if folder else "which could not be kept: set NUMBA_CACHE_DIR to a writable directory"
    console.print(f"CPU kernels: compiled, {escape(kept)}.", highlight=False)


def _check_kernels(console: Console) -> bool:
    """Print how far every fused kernel of this machine is from the dense path; tell if all are right."""
    import torch

    from hf_entmax.ops import backends, self_check

    devices = {"numba": (torch.device("cpu"), platform.processor() or platform.machine())}
    if torch.cuda.is_available():
        devices["triton"] = (torch.device("cuda"), torch.cuda.get_device_name())
    right = True
    for name, (device, kind) in devices.items():
        module = backends.kernel_package(name)
        if isinstance(module, str):
            console.print(f"The {name} backend is not checked: {escape(module)}.")
            continue
        rows = []
        with console.status(f"Checking the {name} backend: some seconds, a minute where kernels are compiled"):
            for case, parts in itertools.groupby(self_check.findings(module, device), lambda finding: finding.case):
                worst = max(parts, key=lambda finding: (not finding.right, finding.error))
                right &= worst.right
                error = worst.raised or f"{worst.error:.1e} ({worst.part})"
                verdict = "[green]right[/]" if worst.right else "[red]wrong[/]"
                rows.append((case, escape(error), f"{worst.allowed:.0e}", verdict))
        title = f"{name} on {kind}: largest difference from float64"
        console.print(table(escape(title), ("case", "difference", "allowed", ""), rows))
    return right


def check_folder(model: str) -> None:
    """Raise where a name looks like a folder that is not there."""
    looks_like_a_folder = model.startswith((".", "~", "/")) or model.count("/") > 1 or Path(model).is_absolute()
    if looks_like_a_folder and not Path(model).is_dir():
        raise ValueError(f"There is no folder {model}: give one that holds a saved model, or a Hub id (owner/name).")


def saved_config(model: str) -> Any:
    """Load the configuration of a model, at once from the cache where the Hub cannot be reached."""
    import transformers

    there = Path(model).is_dir() or _hub_answers()
    try:
        return transformers.AutoConfig.from_pretrained(model, local_files_only=not there)
    except OSError as error:
        if there:
            raise
        raise FileNotFoundError(
            f"{model} is no folder, no model_type of Transformers and not in the cache of the Hub, which cannot be reached from "
            "here: give a folder that holds a saved model, or a model_type such as llama."
        ) from error


def _hub_answers(seconds: float = 3.0) -> bool:
    """Try to connect once; Transformers would retry for most of a minute."""
    import os
    import socket
    from urllib.parse import urlsplit

    from huggingface_hub import constants

    if constants.is_offline_mode():
        return False
    if any(
        os.environ.get(name)
        for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
    ):
        return True  # whether a proxy reaches the Hub, it says itself
    address = urlsplit(constants.ENDPOINT)
    try:
        port = address.port or (80 if address.scheme == "http" else 443)
        socket.create_connection((address.hostname or "", port), timeout=seconds).close()
    except OSError:
        return False
    return True


def _round_trip() -> None:
    import tempfile

    import torch
    from transformers import BartConfig, BartForConditionalGeneration

    import hf_entmax

    sizes: dict[str, Any] = dict.fromkeys(("encoder_layers", "decoder_layers"), 1)
    sizes |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    sizes |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "d_model"), 16)
    config = BartConfig(**sizes, vocab_size=16, max_position_embeddings=16)
    model = hf_entmax.patch_model(BartForConditionalGeneration(config))
    ids = torch.arange(3, 12)[None]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    model.eval()
    with tempfile.TemporaryDirectory() as directory, torch.no_grad():
        model.save_pretrained(directory)
        again = BartForConditionalGeneration.from_pretrained(directory)
        if not torch.equal(again(input_ids=ids, labels=ids).logits, model(input_ids=ids, labels=ids).logits):
            raise RuntimeError("the loaded model computes other logits than the saved one")


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    if importlib.util.find_spec(package) is None:
        return "not installed"
    try:
        return version(package)
    except PackageNotFoundError:
        return "installed"


def table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """Make a table to print."""
    made = Table(*columns, title=title)
    for row in rows:
        made.add_row(*row)
    return made
