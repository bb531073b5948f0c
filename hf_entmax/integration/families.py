"""What is known about model families, as data: who is refused and why.

A family that is not named here is judged by its code alone (see ``discovery``): most need no entry.
"""

from __future__ import annotations

import re

#: ``config.model_type`` -> why its attention cannot be patched (it computes the softmax itself, outside Transformers'
#: attention interface, or only some of its sites go through the interface).
REFUSED: dict[str, str] = {
    "big_bird": "its block-sparse attention computes its softmax over blocks, outside the attention interface",
    "bigbird_pegasus": "its encoder's block-sparse attention computes its own softmax; only its decoder uses the interface",
    "bloom": "its ALiBi attention computes its own softmax",
    "codegen": "its attention computes its own softmax",
    "convbert": "it mixes convolution into attention and computes its own softmax",
    "deberta": "its disentangled attention computes its own softmax",
    "deberta-v2": "its disentangled attention computes its own softmax",
    "falcon": "its attention computes its own softmax",
    "fsmt": "its attention computes its own softmax; Marian is the nearest family that can be patched",
    "gpt_neo": "its attention computes its own softmax; GPT-2 and GPT-NeoX can be patched",
    "gptj": "its attention computes its own softmax; GPT-NeoX is the nearest family that can be patched",
    "led": "its windowed encoder attention computes its own softmax",
    "longformer": "its windowed attention computes its own softmax",
    "longt5": "its encoder's local (or transient-global) attention computes its own softmax; only its decoder uses the interface",
    "megatron-bert": "its attention computes its own softmax; BERT can be patched",
    "mpnet": "its relative attention computes its own softmax",
    "mpt": "its ALiBi attention computes its own softmax",
    "mvp": "its attention computes its own softmax; BART can be patched",
    "nystromformer": "it approximates the softmax by the Nystroem method",
    "openai-gpt": "its attention computes its own softmax; GPT-2 can be patched",
    "pegasus_x": "its encoder's block-local attention computes its own softmax; only its decoder uses the interface",
    "prophetnet": "its n-gram attention computes its own softmax",
    "rembert": "its attention computes its own softmax",
    "roformer": "its rotary attention computes its own softmax",
    "swinv2": "its cosine attention computes its own softmax",
    "wavlm": "its gated relative attention computes its own softmax",
    "xglm": "its attention computes its own softmax",
    "xlnet": "its two-stream attention computes its own softmax",
}

#: Attention whose softmax stays on purpose, by class: it pools a sequence into one vector, or it lies in an image
#: tokenizer, whose output is a code and no attention between the tokens of the model.
KEPT_CLASSES: re.Pattern[str] = re.compile(r"Pooling|Pooler|VQVAE")

#: ``config.model_type`` of models whose attention reads the mask as booleans, whatever the attention implementation.
BOOLEAN_MASKS: frozenset[str] = frozenset({"nemotron_asr_streaming_encoder", "parakeet_encoder"})
