"""Word times: the choice of heads and the cut into words on planted weights, exact intervals on a model."""

import copy
import itertools

import pytest
import torch
import transformers as tf
from tiny_speech import RATE, tiny_processor, tiny_whisper

import hf_entmax
from hf_entmax.analysis import plots
from hf_entmax.generation import word_times
from hf_entmax.generation.word_times import follow_speech, narrow_heads, onset, path_share, segments
from hf_entmax.integration.observe import observe_attention

TEXT = "to be, or not"


def diagonal(tokens: int, frames: int, step: int, shift: int = 0) -> torch.Tensor:
    weights = torch.zeros(tokens, frames)
    for token in range(tokens):
        weights[token, min(max(token * step + shift, 0), frames - 1)] = 1.0
    return weights


def noise(seconds: float = 1.0) -> torch.Tensor:
    return 0.1 * torch.randn(int(seconds * RATE), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def sparse():
    return hf_entmax.patch_model(tiny_whisper(), alpha=1.5, sites=("cross",))


def test_the_share_on_a_path_is_the_best_over_all_paths():
    torch.manual_seed(0)
    weights = torch.rand(3, 4, 9).softmax(-1)
    near = torch.stack([weights[..., max(0, f - 2) : f + 3].sum(-1) for f in range(9)], -1)
    paths = list(itertools.combinations(range(9), 4))
    best = [max(sum(head[t, f] for t, f in enumerate(path)) for path in paths) / 4 for head in near]
    torch.testing.assert_close(path_share(weights), torch.stack(best))


def test_heads_that_follow_the_speech_are_chosen():
    rest = torch.zeros(12, 200)
    rest[:, 150] = 1.0  # always the same frame: on no path that moves on
    backwards = diagonal(12, 200, 10).flip(0)
    late = diagonal(12, 200, 10, shift=40)  # 0.8 s behind
    weights = {(0, 0): diagonal(12, 200, 10), (0, 1): rest, (1, 0): backwards, (1, 1): late}
    weights |= {(2, 0): diagonal(12, 200, 10, shift=2), (2, 1): torch.full((12, 200), 1 / 200)}
    assert follow_speech(weights, 0.02) == [(0, 0), (2, 0)]
    sinking = 0.9 * diagonal(12, 200, 10)
    sinking[:, 199] += 0.1
    assert narrow_heads({(0, 0): weights[0, 0], (0, 1): sinking}, 0.02) == [(0, 0)]
    assert narrow_heads({(0, 1): sinking}, 0.02) == [(0, 1)]  # better than none


def test_a_word_begins_behind_the_last_pause_before_its_largest_weight():
    weights = torch.zeros(40)
    weights[5], weights[20:24] = 0.375, torch.tensor([0.125, 0.375, 0.25, 0.25])  # "um", and the word 0.3 s later
    assert onset(weights, 5, 24) == 5  # as large as any of the word
    weights[5] = 0.25
    assert onset(weights, 5, 24) == 20 and onset(weights, 22, 24) == 22
    weights[16] = 0.125  # three frames are no pause
    assert onset(weights, 5, 24) == 16
    weights[16] = 0.0625  # less than a fifth of the largest is quiet
    assert onset(weights, 5, 24) == 20
    weights[20:24] = torch.tensor([0.09375, 0.375, 0.375, 0.375])
    assert onset(weights, 5, 24) == 21  # no longer quiet, but less than a tenth of the weight from there on
    assert onset(weights, 30, 30) == 30 and onset(weights, 30, 33) == 30  # nobody looked there


@pytest.mark.parametrize("seed", range(4))
def test_segments_hold_as_much_weight_as_possible(seed):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(3, 8, generator=generator) * (torch.rand(3, 8, generator=generator) < 0.5)
    held = lambda cuts: sum(float(weights[w, a:b].sum()) for w, (a, b) in enumerate(cuts))  # noqa: E731
    best = max(held(list(itertools.pairwise(cuts))) for cuts in itertools.combinations_with_replacement(range(9), 4))
    found = segments(weights)
    assert held(found) == pytest.approx(best)
    assert all(begin <= end for begin, end in found) and all(a[1] <= b[0] for a, b in itertools.pairwise(found))
    for word, (begin, end) in enumerate(found):
        assert begin == end or (weights[word, begin] > 0 and weights[word, end - 1] > 0)


def test_no_head_looked_outside_the_interval(sparse):
    processor = tiny_processor()
    words = word_times(sparse, processor, noise(), sampling_rate=RATE, text=TEXT)
    assert [word.word for word in words] == TEXT.split()
    ids = processor.tokenizer(TEXT)["input_ids"]
    features = processor.feature_extractor(noise().numpy(), sampling_rate=RATE, return_tensors="pt").input_features
    with torch.no_grad():
        seen = sparse(features, decoder_input_ids=torch.tensor([ids[:-1]]), output_attentions=True).cross_attentions
    first = 2  # behind <|startoftranscript|> <|notimestamps|>; each byte is a token
    for word, place in zip(words, (0, 2, 6, 9), strict=True):
        letters = range(first + place, first + place + len(word.word.rstrip(",")) + (place > 0))
        looked = torch.stack([seen[layer][0, head, [i - 1 for i in letters]] for layer, head in word.narrow]).sum(
            (0, 1)
        )
        frames = looked.nonzero().flatten()
        assert word.interval == pytest.approx((0.02 * int(frames[0]), 0.02 * (int(frames[-1]) + 1)))
        assert len(frames) < 100 and set(word.narrow) <= set(word.heads)
    assert all(a.end <= b.start for a, b in itertools.pairwise(words)) and words[-1].end <= 1.0


def test_heads_can_be_given_and_words_generated(sparse):
    words = word_times(
        sparse, tiny_processor(), noise(), sampling_rate=RATE, heads=[(1, 1)], max_new_tokens=12, do_sample=True
    )
    assert all(word.heads == ((1, 1),) for word in words)
    assert word_times(sparse, tiny_processor(), noise().double(), sampling_rate=RATE, text="") == []
    with pytest.raises(ValueError, match=r"heads: \[\(7, 0\)\] are no heads"):
        word_times(sparse, tiny_processor(), noise(), sampling_rate=RATE, text=TEXT, heads=[(7, 0)])


@pytest.mark.parametrize(
    ("audio", "rate", "error", "says"),
    [
        ("speech.wav", RATE, TypeError, "read the file first"),
        (object(), RATE, TypeError, "must be samples"),
        (torch.zeros(2, 100), RATE, ValueError, "one channel"),
        (torch.zeros(0), RATE, ValueError, "empty"),
        (torch.full((100,), float("nan")), RATE, ValueError, "not finite"),
        (torch.zeros(100), 8000, ValueError, "resample the audio to 16000 Hz"),
        (torch.zeros(3 * RATE), RATE, ValueError, "3.0 s long, and the model hears 2 s"),
    ],
)
def test_bad_audio_is_named(sparse, audio, rate, error, says):
    with pytest.raises(error, match=says):
        word_times(sparse, tiny_processor(), audio, sampling_rate=rate)


def test_a_softmax_is_refused(sparse):
    with pytest.raises(ValueError, match="no sparse cross-attention"):
        word_times(tiny_whisper(), tiny_processor(), noise(), sampling_rate=RATE)
    with pytest.raises(ValueError, match="nothing is generated: leave num_beams out"):
        word_times(sparse, tiny_processor(), noise(), sampling_rate=RATE, text=TEXT, num_beams=2)


def test_the_figure_names_every_word(sparse):
    words = word_times(sparse, tiny_processor(), noise(), sampling_rate=RATE, text=TEXT)
    figure = plots.word_times(words, noise(), RATE, truth=[("to", 0.1, 0.2)])
    wave, grid = figure.axes
    assert (
        [label.get_text() for label in grid.get_yticklabels()]
        == TEXT.split()
        == [text.get_text() for text in wave.texts]
    )
    frames = sum(int((word.weights > 0).sum()) for word in words)
    assert len(grid.patches) == frames + len(words)
    with pytest.raises(ValueError, match="nothing to draw"):
        plots.word_times([], noise(), RATE)


@pytest.mark.parametrize("sites", [("cross",), None])
def test_the_pipeline_of_transformers_hears_long_recordings(sites):
    processor = tiny_processor()
    model = hf_entmax.patch_model(tiny_whisper(), alpha=1.5, sites=sites)
    tokenizer = copy.deepcopy(processor.tokenizer)
    assert tokenizer.add_tokens([f"<|{0.02 * step:.2f}|>" for step in range(101)]) == 101
    model.resize_token_embeddings(len(tokenizer))
    model.generation_config.no_timestamps_token_id = tokenizer.convert_tokens_to_ids("<|notimestamps|>")
    model.generation_config.is_multilingual = model.generation_config.return_timestamps = False
    ears = tf.pipeline(
        "automatic-speech-recognition", model, tokenizer=tokenizer, feature_extractor=processor.feature_extractor,
        chunk_length_s=2, stride_length_s=0.5, batch_size=2,
    )  # fmt: skip
    sounds = [{"raw": noise(seconds).numpy(), "sampling_rate": RATE} for seconds in (5.0, 1.0)]
    observed = []
    with observe_attention(model, lambda call: observed.append((call.weights == 0).any())):
        plain = ears([dict(sound) for sound in sounds])
    assert all(observed) if sites is None else any(observed)  # sparse in every call
    alone = [ears(dict(sound), batch_size=1) for sound in sounds]
    assert [found["text"] for found in plain] == [found["text"] for found in alone]
    timed = ears(dict(sounds[1]), return_timestamps=True)
    assert isinstance(timed["chunks"], list)
