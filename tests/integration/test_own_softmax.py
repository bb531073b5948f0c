"""What a module's forward does decides: its own softmax is refused or named, linear attention is neither."""

import warnings
from collections import Counter

import pytest
import tiny_models as tiny
import torch
import transformers as tf
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_entmax
from hf_entmax import patch_model, unpatched_softmax
from hf_entmax.integration.discovery import attention_sites, check_supported
from hf_entmax.integration.families import BOOLEAN_MASKS
from hf_entmax.integration.forward_code import has_own_softmax

_TEXT = dict(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)


def _on_meta(model_class, config):
    """The model without numbers: enough to look at its code, at any size."""
    with torch.device("meta"):
        return getattr(tf, model_class)(config)


def _siglip():
    return tf.SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
    )


#: model class, configuration -> the modules that keep a softmax
KEPT = {
    "chameleon": (
        "ChameleonForConditionalGeneration",
        lambda: tf.ChameleonConfig(vocabulary_map={"<image>": 4}, **_TEXT),
        ["model.vqmodel.encoder.mid.attn_1"],
    ),
    "janus": (
        "JanusForConditionalGeneration",
        lambda: tf.JanusConfig(text_config=_TEXT, vision_config={"num_hidden_layers": 1, "depth": 1}),
        [
            "model.vqmodel.encoder.down.4.attn.0",
            "model.vqmodel.encoder.down.4.attn.1",
            "model.vqmodel.encoder.mid.attn_1",
            "model.vqmodel.decoder.mid.attn_1",
            "model.vqmodel.decoder.up.0.attn.0",
            "model.vqmodel.decoder.up.0.attn.1",
            "model.vqmodel.decoder.up.0.attn.2",
        ],
    ),
    "siglip": ("SiglipVisionModel", _siglip, ["head.attention"]),
    "deepseek_v4": (
        "DeepseekV4ForCausalLM",
        lambda: tf.DeepseekV4Config(num_hidden_layers=2),
        None,  # many: those of the attention are named below
    ),
    "wav2vec2": ("Wav2Vec2ForPreTraining", lambda: tf.Wav2Vec2Config(num_hidden_layers=1), ["quantizer"]),
    "mixtral": ("MixtralForCausalLM", lambda: tf.MixtralConfig(**_TEXT), []),
    "gpt_oss": ("GptOssForCausalLM", lambda: tf.GptOssConfig(num_hidden_layers=1), []),
    "deepseek_v2": ("DeepseekV2ForCausalLM", lambda: tf.DeepseekV2Config(num_hidden_layers=2), []),
    "gpt2": ("GPT2LMHeadModel", lambda: tf.GPT2Config(n_layer=1), []),
}


@pytest.mark.parametrize("name", list(KEPT))
def test_what_keeps_its_softmax_is_listed_and_said(name):
    model_class, config, expected = KEPT[name]
    model = _on_meta(model_class, config())
    listed = unpatched_softmax(model)
    if expected is None:
        endings = Counter(".".join(n.split(".")[-2:]) for n in listed if "self_attn" in n)
        assert endings.keys() & {"self_attn.compressor", "compressor.indexer"}
    else:
        assert listed == expected
    if not listed:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            patch_model(model)
    else:
        with pytest.warns(
            UserWarning, match=rf"{len(listed)} modules? of this {model_class}.*{listed[0]}.*unpatched_softmax"
        ):
            patch_model(model)
    assert unpatched_softmax(model) == listed


def test_the_card_names_what_keeps_its_softmax(tmp_path):
    with pytest.warns(UserWarning):
        model = patch_model(tf.SiglipVisionModel(_siglip()))
    model.save_pretrained(tmp_path)
    assert "keep a softmax of their own: `head.attention`." in (tmp_path / "README.md").read_text()
    patch_model(tiny.build("gpt2")).save_pretrained(tmp_path / "none")
    assert "softmax of their own" not in (tmp_path / "none/README.md").read_text()


#: What used to be refused for a name, and is no attention outside the interface; with the number of sites of each kind.
CLEARED = {
    "florence2": (
        "Florence2ForConditionalGeneration",
        lambda: tf.Florence2Config(vision_config={"depths": (1, 1, 1, 1)}),
        {"encoder_self": 4 * 2 + 12, "decoder_self": 12, "cross": 12},
    ),
    "bailing_hybrid": (
        "BailingHybridForCausalLM",
        lambda: tf.BailingHybridConfig(num_hidden_layers=8),
        {"decoder_self": 1},
    ),
    "kimi_linear": ("KimiLinearForCausalLM", lambda: tf.KimiLinearConfig(num_hidden_layers=8), {"decoder_self": 1}),
    "minimax": ("MiniMaxForCausalLM", lambda: tf.MiniMaxConfig(**_TEXT), {"decoder_self": 1}),
    "olmo_hybrid": ("OlmoHybridForCausalLM", lambda: tf.OlmoHybridConfig(num_hidden_layers=4), {"decoder_self": 1}),
}


@pytest.mark.parametrize("name", list(CLEARED))
def test_linear_attention_and_groups_of_channels_are_no_reason_to_refuse(name):
    model_class, config, sites = CLEARED[name]
    model = _on_meta(model_class, config())
    check_supported(model)
    assert Counter(site.site for site in attention_sites(model)) == sites
    assert all(site.num_heads > 0 for site in attention_sites(model))


def test_a_model_with_linear_attention_too():
    torch.manual_seed(0)
    config = tf.MiniMaxConfig(**_TEXT, head_dim=8, block_size=4, num_local_experts=2)
    assert set(config.layer_types) == {"linear_attention", "full_attention"}
    batch = {"input_ids": torch.randint(3, 32, (2, 9))}
    _attends_like_softmax(tf.MiniMaxForCausalLM(config), batch, lambda output: output.logits)


def test_a_pooling_head_is_no_reason_to_refuse():
    with torch.device("meta"):
        model = tf.models.phi4_multimodal.modeling_phi4_multimodal.Phi4MultimodalVisionModel(
            tf.Phi4MultimodalConfig().vision_config
        )
    check_supported(model)
    assert unpatched_softmax(model) == ["head.attention"]


def test_attention_of_torch_outside_a_pooling_head_is_refused():
    model = _on_meta("AriaForConditionalGeneration", tf.AriaConfig(text_config={"num_hidden_layers": 1}))
    with pytest.raises(ValueError, match=r"'aria'.*cannot be patched.*multihead_attn"):
        patch_model(model)


def _helper(scores):
    return (lambda x: x.softmax(-1))(scores)


class _Base(nn.Module):
    def weigh(self, scores):
        return _helper(scores)

    def forward(self, x):
        return self.weigh(x)


class _Derived(_Base):
    def forward(self, x):
        return super().forward(x) + 1


class _Scaled(nn.Module):
    def forward(self, x, softmax_scale=2.0):
        return x * softmax_scale


class _Held(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.Softmax(-1)

    def forward(self, x):
        return self.norm(x)


class _Choice(nn.Module):
    def forward(self, x):
        num_experts = x.shape[-1]
        return x.softmax(-1).topk(num_experts)


class _CallsEager(nn.Module):
    """A function that is called eager, without the interface, is its own."""

    def forward(self, x):
        return eager_weights(x)


def eager_weights(x):
    return torch.softmax(x, -1)


normalize = torch.softmax


class _Renamed(nn.Module):
    def forward(self, x):
        return normalize(x, -1)


class _Attribute(nn.Module):
    """The interface is a mapping: its attributes are none of its functions, so this runs the eager one whatever is asked."""

    def forward(self, x):
        getattr(self, "unused", None)
        return getattr(ALL_ATTENTION_FUNCTIONS, self.config._attn_implementation, eager_weights)(x)


class _Function(nn.Module):
    def forward(self, x):
        getattr(self, "unused", None)
        return ALL_ATTENTION_FUNCTIONS.get_interface(getattr(self, "implementation", "eager"), eager_weights)(x)


@pytest.mark.parametrize(
    "module, own",
    [
        (_Base(), True),
        (_Derived(), True),
        (_Held(), True),
        (_CallsEager(), True),
        (_Renamed(), True),
        (_Attribute(), True),
        (_Function(), False),
        (nn.MultiheadAttention(4, 2), True),
        (nn.Softmax(-1), False),
        (_Scaled(), False),
        (_Choice(), False),
        (nn.Linear(2, 2), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_how_a_softmax_is_told(module, own):
    assert has_own_softmax(module) is own


@pytest.mark.parametrize("family", list(tiny.FAMILIES))
def test_a_text_model_keeps_nothing(family):
    assert unpatched_softmax(tiny.build(family)) == []


def test_cross_attention_of_a_query_former():
    config = tf.Blip2QFormerConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, encoder_hidden_size=16
    )
    sites = attention_sites(tf.Blip2QFormerModel(config))
    assert [(site.site, site.name.split(".")[-2]) for site in sites] == [
        ("encoder_self", "attention"),
        ("cross", "crossattention"),
        ("encoder_self", "attention"),
    ]


def _attends_like_softmax(model, batch, read):
    """At alpha = 1 the patched model is the SDPA model, and learned alphas all get a gradient."""
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2 and parameter.std() > 0:
                parameter.mul_(0.3 / parameter.std())
        model.set_attn_implementation("sdpa")
        plain = read(model(**batch))
        ours = read(patch_model(model, alpha=1.0)(**batch))
    assert torch.allclose(ours, plain, atol=1e-5)
    hf_entmax.unpatch_model(model)
    sparse = read(patch_model(model, alpha_init=1.3)(**batch))
    assert not torch.allclose(sparse, plain, atol=1e-3)
    (sparse * torch.randn(sparse.shape, generator=torch.Generator().manual_seed(0))).sum().backward()
    assert all(p.grad.abs().min() > 1e-4 for n, p in model.named_parameters() if "entmax_norm" in n)


@pytest.mark.parametrize("family", ["NemotronAsrStreaming", "Parakeet"])
def test_speech_encoders_that_read_their_mask_as_booleans(family):
    torch.manual_seed(0)
    sizes = dict(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        subsampling_conv_channels=4,
        num_mel_bins=16,
    )
    if family == "NemotronAsrStreaming":
        sizes |= dict(sliding_window=5, default_num_lookahead_tokens=2)
    config = getattr(tf, f"{family}EncoderConfig")(**sizes)
    assert config.model_type in BOOLEAN_MASKS
    mask = torch.ones(2, 80, dtype=torch.long)
    mask[1, 50:] = 0
    model = getattr(tf, f"{family}Encoder")(config)

    def read(output):
        real = model._get_output_attention_mask(mask, target_length=output[0].shape[1]).bool()
        return output[0][real]  # frames of padding see nothing, and nothing sees them

    _attends_like_softmax(model, {"input_features": torch.randn(2, 80, 16), "attention_mask": mask}, read)


def test_a_model_that_inverts_an_additive_mask_is_refused(monkeypatch):
    config = tf.ParakeetEncoderConfig(num_hidden_layers=1)
    monkeypatch.setattr("hf_entmax.integration.discovery.BOOLEAN_MASKS", frozenset())
    with pytest.raises(ValueError, match=r"'parakeet_encoder'.*cannot be patched.*mask as booleans"):
        patch_model(_on_meta("ParakeetEncoder", config))


def test_keys_that_an_indexer_chose_are_all_that_is_seen():
    torch.manual_seed(0)
    batch = {"input_ids": torch.randint(3, 32, (2, 12))}
    mla = dict(kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4)
    config = tf.DeepseekV32Config(
        **_TEXT,
        **mla,
        moe_intermediate_size=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        index_topk=3,
        index_n_heads=2,
        index_head_dim=8,
    )
    _attends_like_softmax(tf.DeepseekV32ForCausalLM(config), batch, lambda output: output.logits)
    config = tf.MiniMaxM3VLTextConfig(
        **{**_TEXT, "num_attention_heads": 4},
        dense_intermediate_size=16,
        shared_intermediate_size=8,
        head_dim=8,
        rotary_dim=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        index_n_heads=2,
        index_head_dim=8,
        index_block_size=2,
        index_topk_blocks=2,
        layer_types=["full_attention", "minimax_m3_sparse"],
    )
    _attends_like_softmax(tf.MiniMaxM3VLForCausalLM(config), batch, lambda output: output.logits)


def test_every_alpha_of_a_video_encoder_gets_a_gradient():
    """Not under a loss like ``last_hidden_state.sum()``, which the last layer norm makes constant."""
    torch.manual_seed(0)
    config = tf.VideoPrismVisionConfig(
        hidden_size=32,
        num_attention_heads=4,
        intermediate_size=32,
        num_spatial_layers=1,
        num_temporal_layers=1,
        image_size=16,
        num_frames=4,
        tubelet_size=[1, 8, 8],
    )
    model = patch_model(tf.VideoPrismVisionModel(config))
    out = model(torch.randn(2, 4, 3, 16, 16)).last_hidden_state
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(0))).sum().backward()
    assert all((p.grad != 0).all() for n, p in model.named_parameters() if "entmax_norm" in n)
