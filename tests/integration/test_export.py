"""Traced and exported models stand alone and compute what the model computes."""

import pytest
import tiny_models as tiny
import torch

from hf_entmax import patch_model

#: An encoder, a decoder and both, of one layer, with learned alphas.
_LEARNED = [(family, {}, 1) for family in ("bert", "llama", "bart")]


class Logits(torch.nn.Module):
    """A model that takes tensors by position and returns its logits."""

    def __init__(self, model, names):
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *tensors):
        return self.model(**dict(zip(self.names, tensors, strict=True))).logits


def _case(family, options, layers=1):
    """A model, its inputs and its logits; one layer, since exporters take their time over every one."""
    with pytest.MonkeyPatch.context() as sizes:
        for table in (tiny._BERT, tiny._LLAMA):
            sizes.setitem(table, "num_hidden_layers", layers)
        sizes.setitem(tiny._SEQ, "encoder_layers", layers)
        sizes.setitem(tiny._SEQ, "decoder_layers", layers)
        plain = tiny.build(family)
    batch = tiny.inputs(family)
    batch["attention_mask"][0, -2:] = 0
    model = patch_model(plain, **options)
    model.config.use_cache = False
    model = Logits(model, list(batch)).eval()
    with torch.no_grad():
        return model, tuple(batch.values()), model(*batch.values())


@pytest.mark.slow
@pytest.mark.parametrize(("family", "options", "layers"), [*_LEARNED, ("bert", {"alpha": 1.5}, 2)])
def test_a_trace_is_saved_and_computes_the_same(tmp_path, family, options, layers):
    model, tensors, expected = _case(family, options, layers)
    with torch.no_grad():
        torch.jit.trace(model, tensors, check_trace=False).save(tmp_path / "model.pt")
        found = torch.jit.load(tmp_path / "model.pt")(*tensors)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_a_kernel_asked_for_by_name_is_not_traced():
    pytest.importorskip("numba")
    model, tensors, _ = _case("bert", {"backend": "numba"})
    with torch.no_grad(), pytest.raises(ValueError, match="cannot be recorded by torch"):
        torch.jit.trace(model, tensors, check_trace=False)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "options", "layers"), [*_LEARNED[1:], ("bert", {"alpha": 1.5}, 2)])
def test_an_exported_program_needs_no_kernel_of_ours(family, options, layers):
    model, tensors, expected = _case(family, options, layers)
    with torch.no_grad():
        program = torch.export.export(model, tensors)
        found = program.module()(*tensors)
    assert not [node.target for node in program.graph.nodes if "hf_entmax" in str(node.target)]
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def _onnx_runs(model, tensors, expected, path, shapes=None, others=()):
    """Export, and compare what onnxruntime computes: for the inputs it was exported with and for others."""
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    with torch.no_grad():
        torch.onnx.export(
            model, tensors, path, input_names=model.names, dynamo=True, verbose=False, dynamic_shapes=shapes
        )
    session = runtime.InferenceSession(path)
    for given, wanted in [(tensors, expected), *others]:
        feed = {put.name: given[model.names.index(put.name)].numpy() for put in session.get_inputs()}
        (found,) = session.run(None, feed)
        torch.testing.assert_close(torch.from_numpy(found), wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.works_with("onnxruntime", "torch.onnx.export(dynamo=True) of encoders, decoders and encoder-decoders")
@pytest.mark.parametrize(
    ("family", "options", "layers"), [(f, o, n) for f, o, n in _LEARNED if f != "llama"] + [("bert", {"alpha": 1.5}, 2)]
)
def test_onnx_runs_elsewhere(tmp_path, family, options, layers):
    _onnx_runs(*_case(family, options, layers), tmp_path / "model.onnx")


@pytest.mark.slow
@pytest.mark.works_with("onnxruntime", "torch.onnx.export(dynamo=True) of decoders with a free batch size and length")
@pytest.mark.parametrize(("family", "options"), [("llama", {"alpha": 1.5}), ("llama", {})])
def test_onnx_takes_batches_of_other_sizes(tmp_path, family, options):
    """The sizes it was exported with among them."""
    model, tensors, expected = _case(family, options)
    others = []
    for rows, length in ((1, 4), (2, 13)):
        mask = torch.ones(rows, length, dtype=torch.long)
        mask[0, -1] = 0
        batch = torch.randint(3, tiny.VOCAB, (rows, length)), mask
        with torch.no_grad():
            others.append((batch, model(*batch)))
    free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    _onnx_runs(model, tensors, expected, tmp_path / "model.onnx", ((free, free),), others)


@pytest.mark.slow
def test_an_alpha_above_2_is_exported_too():
    model, tensors, expected = _case("bert", {"alpha_range": (1.0, 4.0), "alpha_init": 3.0})
    with torch.no_grad():
        found = torch.export.export(model, tensors).module()(*tensors)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
