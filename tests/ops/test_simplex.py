"""The projection onto the simplex against the enumeration of supports, quadratic programming and its own conditions."""

import math

import numpy as np
import pytest
import torch
from simplex_oracles import minimise_on_simplex, project_by_enumeration

from hf_entmax.ops import controllable as C
from hf_entmax.ops.mapping import sparsemax

F64 = torch.float64


class TestProjection:
    @pytest.mark.parametrize("k", [1, 2, 3, 6])
    @pytest.mark.parametrize("spread", [0.05, 1.0, 20.0])
    def test_equals_the_enumeration_of_all_supports(self, k, spread):
        z = torch.randn(30, k, dtype=F64) * spread
        expected = np.stack([project_by_enumeration(row) for row in z.numpy()])
        assert np.abs(sparsemax(z).numpy() - expected).max() < 1e-12

    def test_equals_quadratic_programming(self):
        for row in torch.randn(5, 8, dtype=F64).numpy():
            expected = minimise_on_simplex(lambda p, y=row: ((p - y) ** 2).sum(), 8)
            assert np.abs(sparsemax(torch.from_numpy(row)).numpy() - expected).max() < 1e-6

    @pytest.mark.parametrize("k", [64, 1000, 20000])
    @pytest.mark.parametrize("shape", ["normal", "sharp", "equal", "geometric", "crowded"])
    def test_long_rows_satisfy_the_optimality_conditions(self, k, shape):
        z = {
            "normal": lambda: torch.randn(4, k, dtype=F64),
            "sharp": lambda: torch.randn(4, k, dtype=F64) * 50,
            "equal": lambda: torch.zeros(4, k, dtype=F64),
            "geometric": lambda: -torch.logspace(-14, 0, k, dtype=F64).expand(4, k),
            # All candidates crowd just above the lowest value a candidate can have.
            "crowded": lambda: torch.cat([torch.zeros(4, 1, dtype=F64), torch.rand(4, k - 1, dtype=F64) * 1e-6 - 1], 1),
        }[shape]()
        p = sparsemax(z)
        assert (p.sum(-1) - 1).abs().max() < 1e-12
        # On the support z - p is one constant; off it z lies at or below that constant.
        tau = (z - p).masked_fill(p == 0, -math.inf).amax(-1, keepdim=True)
        assert ((z - p - tau) * (p > 0)).abs().max() < 1e-9
        assert bool((z[p == 0] <= (tau.expand_as(z)[p == 0] + 1e-9)).all())

    def test_keeps_only_its_output_for_the_backward_pass(self):
        z = torch.randn(8, 100, requires_grad=True)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            out = sparsemax(z)
        assert len(saved) == 1
        assert saved[0].data_ptr() == out.data_ptr()

    def test_no_sort_is_called(self):
        calls = []

        class Watch(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                calls.append(str(func))
                return func(*args, **(kwargs or {}))

        z = torch.randn(4, 500)
        with Watch():
            sparsemax(z)
            C.sparsehourglass(z)
            C.sparsegen_exp(z)
        assert calls
        assert not [name for name in calls if "sort" in name]
