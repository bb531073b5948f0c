"""The torch path under compilers and function transforms."""

import pytest
import reference
import torch
from environments import inductor_works
from torch.utils.checkpoint import checkpoint

from hf_entmax.ops import Entmax, entmax, entmax_attention, exact_sparse_attention, sketch_keys, solve
from hf_entmax.ops.rows import gradients_operator, probabilities_operator

F64 = torch.float64


def attend(query, key, value, alpha, bias):
    options = {"is_causal": True, "sliding_window": 4, "softcap": 3.0, "backend": "torch"}
    return entmax_attention(query, key, value, alpha, position_bias=bias, **options)[0]


def attention_inputs(dtype=torch.float32):
    shapes = [(2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8), (4,), (1, 4, 5, 7)]
    tensors = [torch.randn(shape, dtype=F64) for shape in shapes]
    tensors[3] = torch.tensor([1.0, 1.3, 1.8, 2.5], dtype=F64)
    return [tensor.to(dtype).requires_grad_() for tensor in tensors]


def outputs_and_gradients(function, inputs):
    leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    out = function(*inputs)
    return [out, *torch.autograd.grad(out.square().sum(), leaves)]


@pytest.fixture(autouse=True)
def _no_compiled_code_left():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [1.0, 1.3, 3.0, "tensor"])
def test_entmax_compiles_to_one_graph(alpha):
    scores = torch.randn(2, 3, 4, 33, requires_grad=True)
    alpha = torch.tensor([1.0, 1.5, 2.6]).view(3, 1, 1).requires_grad_() if alpha == "tensor" else alpha
    compiled = torch.compile(entmax, fullgraph=True, backend="aot_eager")
    actual, expected = outputs_and_gradients(compiled, (scores, alpha)), outputs_and_gradients(entmax, (scores, alpha))
    torch.testing.assert_close(actual, expected)


@pytest.mark.slow
def test_attention_compiles_to_one_graph():
    inputs = attention_inputs()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(outputs_and_gradients(compiled, inputs), outputs_and_gradients(attend, inputs))


@pytest.mark.slow
def test_attention_compiles_with_dynamic_lengths():
    compiled = torch.compile(
        lambda q, k, a: entmax_attention(q, k, k, a, is_causal=True, backend="torch")[0],
        fullgraph=True,
        backend="aot_eager",
        dynamic=True,
    )
    alpha = torch.tensor([1.2, 1.7])
    for length in (5, 8, 13):
        query, key = torch.randn(1, 2, length, 4), torch.randn(1, 2, length, 4)
        expected = entmax_attention(query, key, key, alpha, is_causal=True, backend="torch")[0]
        torch.testing.assert_close(compiled(query, key, alpha), expected)


def test_exact_attention_breaks_the_graph():
    """Keys and a query that the first graph makes, an output that the second one takes."""
    key, value = torch.randn(1, 2, 100, 16), torch.randn(1, 2, 100, 16)
    sketch, query = sketch_keys(2 * key), torch.randn(1, 4, 1, 16)

    def double(query, key, value):
        return 2 * exact_sparse_attention(3 * query, sketch, 2 * key, value, 1.5, sink=torch.zeros(4))[0]

    torch._dynamo.reset()
    with torch.no_grad():
        assert torch.allclose(
            torch.compile(double, backend="eager")(query, key, value), double(query, key, value), atol=1e-6
        )
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(double, backend="eager", fullgraph=True)(query, key, value)


@pytest.mark.slow
def test_inductor():
    if not inductor_works():
        pytest.skip("the inductor of this machine compiles no sum, or there is no C++ compiler")
    inputs = attention_inputs()
    compiled = torch.compile(attend, fullgraph=True)
    actual, expected = outputs_and_gradients(compiled, inputs), outputs_and_gradients(attend, inputs)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_a_wrong_alpha_is_refused_in_a_compiled_graph_too():
    compiled = torch.compile(entmax, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="alpha >= 1"):
        compiled(torch.randn(3, 4), torch.tensor(0.5))


def test_operators():
    scores, cotangent = torch.randn(6, 9), torch.randn(6, 9)
    probs = entmax(scores, 1.5)
    for row_u, u in ((None, 0.5), (torch.rand(6, 1) * 1.5, 0.0)):
        torch.library.opcheck(probabilities_operator, (scores, row_u, u))
        for wanted in ((True, True), (False, True), (True, False)):
            torch.library.opcheck(gradients_operator, (probs, cotangent, row_u, u, *wanted))


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [1.0, 1.3, 3.0, "tensor"])
def test_export_stands_alone(alpha):
    # Also the steps without a look at the values, as they are traced for accelerators.
    given = torch.tensor([1.0, 1.5, 2.0]).view(3, 1, 1) if alpha == "tensor" else alpha
    length = torch.export.Dim("length", min=2, max=4096)
    example = (torch.randn(2, 3, 4, 33),)
    program = torch.export.export(Entmax(given), example, dynamic_shapes={"scores": {3: length}}, strict=False)
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not any("hf_entmax" in target for target in targets)
    for size in (2, 50, 700):
        scores = torch.randn(2, 3, 4, size) * 2
        scores[0, 0, 0] = -torch.inf
        assert (program.module()(scores) - reference.entmax(scores, given)).abs().max() < 2e-6


def test_export_of_attention():
    class Attend(torch.nn.Module):
        def forward(self, query, key, value):
            return entmax_attention(query, key, value, 1.5, is_causal=True, backend="torch")[0]

    inputs = tuple(torch.randn(1, 2, 6, 4) for _ in range(3))
    program = torch.export.export(Attend(), inputs, strict=False)
    torch.testing.assert_close(program.module()(*inputs), Attend()(*inputs))


@pytest.mark.slow
@pytest.mark.parametrize("u", [1e-6, 0.01, 0.3, 0.5, 0.8, 1.0, 1.7])
@pytest.mark.parametrize("kind", ["float", "tensor"])
def test_fixed_numbers_of_steps_suffice(u, kind):
    # The loops as they are traced, where they cannot stop by themselves, on rows that are slow to solve.
    lengths = 2.0 ** torch.arange(1, 17, dtype=F64)
    staircase = torch.cat([torch.full((int(n),), -float(i) / 16 / max(u, 0.1)) for i, n in enumerate(lengths.tolist())])
    flat = torch.randn(2, 100_000) * 0.1 / max(u, 0.1)
    for scores in (staircase[None], flat, torch.randn(300, 64) * 3):
        rows = torch.full((len(scores), 1), u) if kind == "tensor" else u
        exact = float(torch.tensor(u).double()) if kind == "tensor" else u
        probs = solve.solve_chunk(scores.float(), rows, visible=False, above_two=True)
        assert (probs - reference.entmax(scores.float(), 1 + exact)).abs().max() < 2e-6


def test_function_transforms():
    scores, alpha = torch.randn(4, 7, dtype=F64), torch.tensor(1.4, dtype=F64)
    cotangent = torch.randn(4, 7, dtype=F64)

    def loss(z, a):
        return (entmax(z, a) * cotangent).sum()

    leaves = scores.clone().requires_grad_(), alpha.clone().requires_grad_()
    expected = torch.autograd.grad(loss(*leaves), leaves)
    torch.testing.assert_close(torch.func.grad(loss, argnums=(0, 1))(scores, alpha), expected)
    # A batch of alphas over unbatched scores, a batch of rows over one alpha, and both.
    alphas = torch.tensor([1.0, 1.2, 1.5, 2.4], dtype=F64)
    torch.testing.assert_close(torch.vmap(entmax)(scores, alphas), entmax(scores, alphas[:, None]))
    torch.testing.assert_close(torch.vmap(lambda a: entmax(scores, a))(alphas)[1], entmax(scores, 1.2))
    torch.testing.assert_close(torch.vmap(entmax, in_dims=(1, None))(scores, alpha), entmax(scores, alpha, dim=0).T)
    per_row = torch.vmap(torch.func.grad(lambda z, a: (entmax(z, a) ** 2).sum(), argnums=1))(scores, alphas)
    for i, a in enumerate(alphas.tolist()):
        probs = reference.entmax(scores[i], a)
        assert per_row[i].item() == pytest.approx(
            (2 * probs * reference.alpha_derivative(probs, a)).sum().item(), rel=1e-9
        )
    jacobian = torch.func.jacrev(lambda z: entmax(z, 1.5))(scores[0])
    torch.testing.assert_close(jacobian, reference.jacobian(reference.entmax(scores[0], 1.5), 1.5))


def test_second_derivatives():
    scores = torch.randn(5, dtype=F64)

    def value(z):
        return (entmax(z, 1.3) ** 3).sum()

    actual = torch.func.jacrev(torch.func.grad(value))(scores)
    step = 1e-5
    columns = [
        (torch.func.grad(value)(scores + step * unit) - torch.func.grad(value)(scores - step * unit)) / (2 * step)
        for unit in torch.eye(5, dtype=F64)
    ]
    torch.testing.assert_close(actual, torch.stack(columns, -1), atol=1e-7, rtol=1e-5)


def test_attention_under_grad_and_vmap():
    inputs = [tensor.detach() for tensor in attention_inputs(F64)]
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    expected = outputs_and_gradients(attend, leaves)[1:]
    actual = torch.func.grad(lambda *tensors: attend(*tensors).square().sum(), argnums=(0, 1, 2, 3, 4))(*inputs)
    torch.testing.assert_close(list(actual), list(expected))
    batched = torch.vmap(lambda q: entmax_attention(q, *inputs[1:4], is_causal=True)[0])(torch.stack([inputs[0]] * 3))
    torch.testing.assert_close(batched[2], entmax_attention(*inputs[:4], is_causal=True)[0])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(use_reentrant):
    inputs = attention_inputs()
    expected = outputs_and_gradients(attend, inputs)[1:]
    checkpoint(attend, *inputs, use_reentrant=use_reentrant).square().sum().backward()
    for tensor, gradient in zip(inputs, expected, strict=True):
        torch.testing.assert_close(tensor.grad, gradient)


def test_autocast():
    inputs = attention_inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend(*inputs)
    out.float().square().sum().backward()
    expected = outputs_and_gradients(attend, [tensor.detach().clone().requires_grad_() for tensor in inputs])
    assert (out - expected[0]).abs().max() < 0.05
    for tensor, gradient in zip(inputs, expected[1:], strict=True):
        assert tensor.grad.dtype == torch.float32
        assert (tensor.grad - gradient).abs().max() < 0.05 * gradient.abs().max()


def test_meta_tensors_have_shapes():
    scores = torch.randn(2, 3, 4, device="meta", requires_grad=True)
    probs = entmax(scores, 1.5)
    assert probs.shape == scores.shape and probs.device.type == "meta"
    probs.sum().backward()
    assert scores.grad.shape == scores.shape
